//! The store against Garage, a server that others wrote.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::TryStreamExt;
use requirements::require_program;
use s3_server::GarageServer;
use store::{CheckError, FileCache, GetError, PutError, RelativePath, StorageError, Store};
use store_proxy_server::StoreProxyServer;
use tempfile::TempDir;
use wire::v1;

use crate::support::{MIB, about, adapter, format_error_chain, noise, place, resume};

const PATIENCE: Duration = Duration::from_secs(60);

/// A bucket in Garage, and the directory where its user's uploads are recorded.
struct Bucket {
    server: GarageServer,
    home: TempDir,
}

impl Bucket {
    /// Records this test as skipped and returns `None` without Garage.
    fn start() -> Option<Self> {
        let server = GarageServer::start(&require_program("garage")?).unwrap();
        Some(Self { server, home: tempfile::tempdir().unwrap() })
    }

    fn env(&self) -> BTreeMap<String, String> {
        let mut env = self.server.env();
        env.insert("XDG_CACHE_HOME".into(), self.home.path().display().to_string());
        env
    }

    async fn open(&self) -> Store {
        Store::open_with_env(&self.server.url(), self.env()).await.unwrap()
    }

    /// Writes a file to upload.
    fn write_file(&self, seed: u64, len: usize) -> PathBuf {
        let path = self.home.path().join(format!("weights-{seed}"));
        fs::write(&path, noise(seed, len)).unwrap();
        path
    }

    fn read_journals(&self) -> Vec<(PathBuf, String)> {
        let entries = fs::read_dir(self.home.path().join("flotilla/uploads"));
        let paths = entries.into_iter().flatten().map(|entry| entry.unwrap().path());
        paths.filter_map(|path| Some((path.clone(), fs::read_to_string(path).ok()?))).collect()
    }
}

fn key(path: impl Into<String>) -> RelativePath {
    RelativePath::new(path).unwrap()
}

/// Starts an upload and cuts it off when one of its parts was recorded.
async fn cut_off_upload(bucket: &Bucket, file: &Path) {
    let (store, file) = (bucket.open().await, file.to_owned());
    let upload = tokio::spawn(async move { store.put_blob_file(&file).await });
    let began = Instant::now();
    while !bucket.read_journals().iter().any(|(_, text)| text.lines().count() > 1) {
        assert!(began.elapsed() < PATIENCE && !upload.is_finished(), "no part was recorded");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    upload.abort();
    assert!(upload.await.unwrap_err().is_cancelled());
}

#[tokio::test(flavor = "multi_thread")]
async fn blobs_of_all_sizes_read_back_and_in_ranges() {
    let Some(bucket) = Bucket::start() else { return };
    let store = bucket.open().await;
    store.check_access().await.unwrap();
    for len in [0, 1, 3 * MIB] {
        let bytes = Bytes::from(noise(1, len));
        let blob = store.put_blob(bytes.clone()).await.unwrap();
        assert_eq!(store.get_blob(&blob, u64::MAX).await.unwrap(), bytes);
        assert_eq!(store.put_blob(bytes).await.unwrap(), blob);
    }
    // In three parts, and in as many ranges back.
    let bytes = noise(2, 40 * MIB + 1);
    let blob = store.put_blob_file(&bucket.write_file(2, bytes.len())).await.unwrap();
    assert_eq!(store.get_blob(&blob, u64::MAX).await.unwrap(), bytes);
    let hex = blob.digest.strip_prefix("b3:").unwrap();
    let (objects, key) = (store.objects_by_key(), key(format!("blobs/{}/{hex}", &hex[..2])));
    assert_eq!(objects.object_size(&key).await.unwrap(), bytes.len() as u64);
    for range in [0..1, 5..10, 16 * MIB - 1..16 * MIB + 1, bytes.len() - 1..bytes.len()] {
        let wanted = range.start as u64..range.end as u64;
        let read: Vec<Bytes> =
            objects.read_range(&key, wanted).await.unwrap().try_collect().await.unwrap();
        assert_eq!(read.concat(), bytes[range]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_publishers_at_a_time_write_one_tree_and_a_removed_one_takes_nothing_with_it() {
    let Some(bucket) = Bucket::start() else { return };
    let store = bucket.open().await;
    let (source, other) = (adapter(1, 20 * MIB), adapter(2, 2 * MIB));
    let at = resume(1);
    let (one, same) = tokio::join!(
        store.publish_tree(source.path(), &at, about()),
        store.publish_tree(source.path(), &at, about()),
    );
    let (one, same) = (one.unwrap(), same.unwrap());
    assert_eq!(one, same);
    let stays = store.publish_tree(other.path(), &at, about()).await.unwrap();
    let objects = store.objects_by_key();
    let listed = objects.list_objects(&key(&*one.path)).await.unwrap();
    // Three files and the three that describe them.
    assert_eq!(listed.len(), 6, "{listed:?}");
    assert_eq!(listed[&format!("{}/adapter_model.safetensors", one.path)], 20 * MIB as u64);
    let parent = key(one.path.rsplit_once('/').unwrap().0);
    let mut trees = vec![one.path.clone(), stays.path.clone()];
    trees.sort();
    assert_eq!(objects.list_directories(&parent).await.unwrap(), trees);
    store.remove_tree(&at, &one).await.unwrap();
    assert!(objects.list_objects(&key(&*one.path)).await.unwrap().is_empty());
    assert_eq!(objects.list_directories(&parent).await.unwrap(), std::slice::from_ref(&stays.path));
    store.remove_tree(&at, &one).await.unwrap();
    store.read_manifest(&stays).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_the_last_tree_had_is_copied() {
    let Some(bucket) = Bucket::start() else { return };
    let store = bucket.open().await;
    let dir = adapter(1, MIB);
    fs::write(dir.path().join("tokenizer.json"), noise(7, 2 * MIB)).unwrap();
    store.publish_tree(dir.path(), &place(1), about()).await.unwrap();
    fs::write(dir.path().join("adapter_model.safetensors"), noise(2, MIB)).unwrap();
    let tree = store.publish_tree(dir.path(), &place(2), about()).await.unwrap();
    let cache = FileCache::open(&bucket.home.path().join("cache"), 1 << 30).unwrap();
    let fetched = cache.fetch_tree(&store, &tree).await.unwrap();
    assert!(fs::read(fetched.path().join("tokenizer.json")).unwrap() == noise(7, 2 * MIB));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_was_cut_off_goes_on_or_begins_again_if_it_was_forgotten() {
    let Some(bucket) = Bucket::start() else { return };
    // Four parts of 16 MiB are sent at a time.
    for (seed, len, is_forgotten) in [(1, 80 * MIB, false), (2, 80 * MIB, true)] {
        let file = bucket.write_file(seed, len);
        cut_off_upload(&bucket, &file).await;
        let journals = bucket.read_journals();
        assert_eq!(journals.len(), 1);
        if is_forgotten {
            let (path, text) = &journals[0];
            let id = text.split("\"upload\":\"").nth(1).unwrap().split('"').next().unwrap();
            fs::write(path, text.replace(id, &"0".repeat(id.len()))).unwrap();
        }
        let store = bucket.open().await;
        let blob = store.put_blob_file(&file).await.unwrap();
        assert_eq!(store.hash_blob(&blob, &|_| ()).await.unwrap(), None);
        assert!(bucket.read_journals().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn absent_objects_wrong_keys_and_absent_buckets_are_told_apart() {
    let Some(bucket) = Bucket::start() else { return };
    let blob = v1::Blob { digest: wire::Digest::hash_bytes(b"x").to_string(), bytes: 1 };
    let absent = bucket.open().await.get_blob(&blob, 1).await.unwrap_err();
    assert!(
        matches!(absent, GetError::Storage(StorageError::Missing { .. })),
        "{}",
        format_error_chain(&absent)
    );
    let mut env = bucket.env();
    env.insert("AWS_SECRET_ACCESS_KEY".into(), "wrong".into());
    let stranger = Store::open_with_env(&bucket.server.url(), env).await.unwrap();
    let denied = stranger.put_blob(Bytes::from_static(b"x")).await.unwrap_err();
    assert!(
        matches!(denied, PutError::Storage(StorageError::Denied { .. })),
        "{}",
        format_error_chain(&denied)
    );
    let elsewhere = Store::open_with_env("s3://another/store", bucket.env()).await.unwrap();
    let error = elsewhere.check_access().await.unwrap_err();
    assert!(matches!(error, CheckError::Storage(_)), "{}", format_error_chain(&error));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_uses_presigned_urls_and_its_abandoned_upload_is_aborted() {
    let Some(bucket) = Bucket::start() else { return };
    let owner = bucket.open().await;
    let proxy = StoreProxyServer::start(&bucket.server.url(), bucket.env()).unwrap();
    let member =
        Store::open_gateway(&proxy.gateway_store("box-1.trainer+operator").unwrap()).unwrap();
    let bytes = noise(3, 20 * MIB);
    let blob = member.put_blob_file(&bucket.write_file(3, bytes.len())).await.unwrap();
    assert_eq!(member.get_blob(&blob, u64::MAX).await.unwrap(), bytes);
    assert_eq!(owner.get_blob(&blob, u64::MAX).await.unwrap(), bytes);
    let objects = owner.objects_by_key();
    let abandoned = key("runs/raft-1/checkpoints/c0-s1-0123456789ab/weights");
    objects.begin_upload("box-1", &abandoned).await.unwrap();
    assert_eq!(owner.remove_leftovers(Duration::ZERO).await.unwrap().count, 1);
    assert!(owner.find_leftovers(Duration::ZERO).await.unwrap().is_empty());
}
