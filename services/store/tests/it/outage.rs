use std::{fs, time::Duration};

use store::Cache;

use crate::support::{MIB, Place, noise};

/// Waits until the server has seen so many such requests.
async fn until(at: &Place, words: &[&str], count: usize) {
    let seen = async {
        while at.count(words) < count {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), seen).await.expect("the requests were sent");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_finishes_when_the_server_is_killed_midway_and_comes_back() {
    let mut at = Place::s3().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights");
    fs::write(&path, noise(1, 160 * MIB)).unwrap();
    let (store, file) = (at.store.clone(), path.clone());
    let upload = tokio::spawn(async move { store.put_blob_file(&file).await });
    until(&at, &["PUT", "partNumber"], 3).await;
    at.s3.as_mut().unwrap().kill();
    assert!(!upload.is_finished());
    tokio::time::sleep(Duration::from_secs(1)).await;
    at.s3.as_mut().unwrap().restart().unwrap();
    let blob = upload.await.unwrap().unwrap();
    assert_eq!(at.store.get_blob(&blob, u64::MAX).await.unwrap(), noise(1, 160 * MIB));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_finishes_when_the_server_is_killed_midway_and_comes_back() {
    let mut at = Place::s3().await;
    let blob = at.store.put_blob(noise(1, 160 * MIB).into()).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), u64::MAX).unwrap();
    let (store, wanted) = (at.store.clone(), blob.clone());
    let fetch = tokio::spawn(async move { cache.blob(&store, &wanted).await });
    until(&at, &["GET"], 3).await;
    at.s3.as_mut().unwrap().kill();
    assert!(!fetch.is_finished());
    tokio::time::sleep(Duration::from_secs(1)).await;
    at.s3.as_mut().unwrap().restart().unwrap();
    let held = fetch.await.unwrap().unwrap();
    assert_eq!(fs::read(held.path()).unwrap(), noise(1, 160 * MIB));
}
