use std::{fs, time::Duration};

use s3_server::Faults;
use store::FileCache;

use crate::support::{MIB, Place, about, adapter, format_error_chain, noise, place};

/// Waits until the server has served `count` such requests.
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
    let cache = FileCache::open(dir.path(), u64::MAX).unwrap();
    let (store, wanted) = (at.store.clone(), blob.clone());
    let fetch = tokio::spawn(async move { cache.fetch_blob(&store, &wanted).await });
    until(&at, &["GET"], 3).await;
    at.s3.as_mut().unwrap().kill();
    assert!(!fetch.is_finished());
    tokio::time::sleep(Duration::from_secs(1)).await;
    at.s3.as_mut().unwrap().restart().unwrap();
    let held = fetch.await.unwrap().unwrap();
    assert_eq!(fs::read(held.path()).unwrap(), noise(1, 160 * MIB));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_refuses_cuts_short_and_flips_bits_still_gives_what_was_stored() {
    let at = Place::s3().await;
    let server = at.s3.as_ref().unwrap();
    let dir = adapter(3, 3 * MIB);
    let tree = at.store.publish_tree(dir.path(), &place(1), about()).await.unwrap();
    let faults = Faults { seed: 9, refused: 0.2, cut: 0.15, flipped: 0.15, ..Faults::default() };
    server.set_faults(faults);
    for seed in 0..8 {
        let blob = at.store.put_blob(noise(seed, 1000).into()).await.unwrap();
        assert_eq!(at.store.get_blob(&blob, 1000).await.unwrap(), noise(seed, 1000));
        let cached = tempfile::tempdir().unwrap();
        let cache = FileCache::open(cached.path(), u64::MAX).unwrap();
        let held = cache.fetch_tree(&at.store, &tree).await.unwrap();
        let weights = fs::read(held.path().join("adapter_model.safetensors")).unwrap();
        assert_eq!(weights, noise(3, 3 * MIB));
    }
    let counts = server.fault_counts();
    assert!(counts.refused > 0 && counts.cut > 0 && counts.flipped > 0, "{counts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_damaged_each_time_are_never_taken_for_good() {
    let at = Place::s3().await;
    let blob = at.store.put_blob(noise(5, 1000).into()).await.unwrap();
    at.s3.as_ref().unwrap().set_faults(Faults { flipped: 1.0, ..Faults::default() });
    let error = at.store.get_blob(&blob, 1000).await.unwrap_err();
    assert!(format_error_chain(&error).contains("is damaged"), "{}", format_error_chain(&error));
}
