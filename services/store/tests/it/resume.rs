//! A killed publisher continues with the parts it sent; files that a tree shares with the last one
//! are copied within the store.

use std::fs;

use store::{FileCache, Store};

use crate::support::{MIB, Place, about, adapter, noise, place};

/// Of 16 MiB each.
const PARTS: usize = 7;

#[tokio::test]
async fn an_upload_that_was_cut_off_goes_on_with_the_parts_that_are_there() {
    let at = Place::s3().await;
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("weights");
    let bytes = noise(1, PARTS * 16 * MIB - 5);
    fs::write(&file, &bytes).unwrap();
    let mut env = at.s3.as_ref().unwrap().env();
    env.insert("XDG_CACHE_HOME".into(), home.path().join("cache").display().to_string());
    let open = || Store::open_with_env(at.store.url(), env.clone());
    let sent = || at.count(&["PUT", "partNumber"]);
    let store = open().await.unwrap();
    let path = file.clone();
    let killed = tokio::spawn(async move { store.put_blob_file(&path).await });
    // Four parts are in flight: the first has arrived and is recorded when the fifth is sent.
    while sent() < 5 {
        tokio::task::yield_now().await;
    }
    killed.abort();
    assert!(killed.await.unwrap_err().is_cancelled());
    let before = sent();
    let store = open().await.unwrap();
    let blob = store.put_blob_file(&file).await.unwrap();
    let again = sent() - before;
    assert!(again < PARTS, "all {again} parts were sent again");
    assert_eq!(at.count(&["POST", "uploads"]), 1, "another upload was begun");
    assert_eq!(store.hash_blob(&blob, &|_| ()).await.unwrap(), None);
    let left = fs::read_dir(home.path().join("cache/flotilla/uploads")).unwrap().count();
    assert_eq!(left, 0, "it is remembered though it is over");
}

#[tokio::test]
async fn an_upload_that_the_store_forgot_is_begun_again() {
    let at = Place::s3().await;
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("weights");
    fs::write(&file, noise(2, 40 * MIB)).unwrap();
    let mut env = at.s3.as_ref().unwrap().env();
    env.insert("XDG_CACHE_HOME".into(), home.path().join("cache").display().to_string());
    let open = || Store::open_with_env(at.store.url(), env.clone());
    let store = open().await.unwrap();
    let path = file.clone();
    let killed = tokio::spawn(async move { store.put_blob_file(&path).await });
    while at.count(&["PUT", "partNumber"]) < 1 {
        tokio::task::yield_now().await;
    }
    killed.abort();
    let _ = killed.await;
    // As a bucket's lifecycle rule would.
    let uploads = home.path().join("cache/flotilla/uploads");
    for journal in fs::read_dir(&uploads).unwrap() {
        let path = journal.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let id = text.split("\"upload\":\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
        fs::write(&path, text.replace(&id, "00000000-0000-4000-8000-000000000000")).unwrap();
    }
    let store = open().await.unwrap();
    let blob = store.put_blob_file(&file).await.unwrap();
    assert_eq!(store.hash_blob(&blob, &|_| ()).await.unwrap(), None);
}

#[tokio::test]
async fn a_large_file_that_the_last_tree_had_is_copied_in_the_store() {
    for at in Place::all().await {
        let dir = adapter(1, 3 * MIB);
        fs::write(dir.path().join("tokenizer.json"), noise(7, 2 * MIB)).unwrap();
        at.store.publish_tree(dir.path(), &place(1), about()).await.unwrap();
        fs::write(dir.path().join("adapter_model.safetensors"), noise(2, 3 * MIB)).unwrap();
        let tree = at.store.publish_tree(dir.path(), &place(2), about()).await.unwrap();
        let cache = tempfile::tempdir().unwrap();
        let tree = FileCache::open(cache.path(), 1 << 30)
            .unwrap()
            .fetch_tree(&at.store, &tree)
            .await
            .unwrap();
        let got = fs::read(tree.path().join("tokenizer.json")).unwrap();
        assert!(got == noise(7, 2 * MIB));
        if let Some(s3) = &at.s3 {
            let copied = s3.copied();
            assert!(copied.len() == 1 && copied[0].contains("tokenizer.json"), "{copied:?}");
        }
    }
}
