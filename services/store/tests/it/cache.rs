use std::{
    fs::{self, File},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use store::{CacheError, FileCache, GetError, Store};
use tempfile::TempDir;
use wire::v1;

use crate::support::{MIB, Place, about, adapter, disk_use, format_error_chain, noise, place};

const WEIGHTS: &str = "adapter_model.safetensors";

/// Opens the cache as another process would: only the directory is shared.
fn cache(dir: &TempDir, max_bytes: u64) -> FileCache {
    FileCache::open(dir.path(), max_bytes).unwrap()
}

async fn publish(at: &Place, seed: u64, len: usize) -> v1::Tree {
    let step = u32::try_from(seed).unwrap();
    at.store.publish_tree(adapter(seed, len).path(), &place(step), about()).await.unwrap()
}

fn overwrite(path: &Path, bytes: &[u8]) {
    fs::set_permissions(path, PermissionsExt::from_mode(0o644)).unwrap();
    fs::write(path, bytes).unwrap();
}

#[tokio::test]
async fn a_tree_arrives_whole_read_only_and_with_its_manifest() {
    for at in Place::all().await {
        let dir = tempfile::tempdir().unwrap();
        let tree = publish(&at, 1, 20 * MIB).await;
        let held = cache(&dir, u64::MAX).fetch_tree(&at.store, &tree).await.unwrap();
        assert_eq!(fs::read(held.path().join(WEIGHTS)).unwrap(), noise(1, 20 * MIB));
        assert_eq!(fs::read(held.path().join("tokenizer/vocab.txt")).unwrap(), b"");
        for name in ["manifest.json", "B3SUMS", WEIGHTS] {
            let meta = fs::metadata(held.path().join(name)).unwrap();
            assert_eq!(meta.mode() & 0o777, 0o444, "{name}");
            let published = fs::metadata(at.dir.join(&tree.path).join(name)).unwrap();
            assert_ne!(published.ino(), meta.ino(), "a job could write into the store");
        }
        assert_eq!(held.manifest(), &at.store.read_manifest(&tree).await.unwrap());
        assert_eq!(fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
        assert_eq!(fs::read_dir(dir.path().join("locks")).unwrap().count(), 0);
    }
}

#[tokio::test]
async fn concurrent_fetchers_of_one_tree_fetch_it_once() {
    let at = Place::s3().await;
    let dir = tempfile::tempdir().unwrap();
    let tree = publish(&at, 1, 10 * MIB).await;
    let gets = at.count(&["GET"]);
    let caches: Vec<_> = (0..4).map(|_| cache(&dir, u64::MAX)).collect();
    let fetches = caches.iter().map(|cache| cache.fetch_tree(&at.store, &tree));
    let held = futures::future::try_join_all(fetches).await.unwrap();
    assert!(held.iter().all(|tree| tree.path() == held[0].path()));
    // Three files and the manifest.
    assert_eq!(at.count(&["GET"]) - gets, 4);
}

#[tokio::test]
async fn trees_share_the_files_they_have_in_common() {
    let at = Place::s3().await;
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(&dir, u64::MAX);
    let one = cache.fetch_tree(&at.store, &publish(&at, 1, MIB).await).await.unwrap();
    let gets = at.count(&["GET", "adapter_config.json"]);
    let two = cache.fetch_tree(&at.store, &publish(&at, 2, MIB).await).await.unwrap();
    assert_eq!(at.count(&["GET", "adapter_config.json"]), gets);
    let inode = |tree: &Path| fs::metadata(tree.join("adapter_config.json")).unwrap().ino();
    assert_eq!(inode(one.path()), inode(two.path()));
}

#[tokio::test]
async fn a_cached_tree_needs_no_store() {
    let at = Place::file().await;
    let dir = tempfile::tempdir().unwrap();
    let tree = publish(&at, 1, 10).await;
    drop(cache(&dir, u64::MAX).fetch_tree(&at.store, &tree).await.unwrap());
    fs::remove_dir_all(&at.dir).unwrap();
    let held = cache(&dir, u64::MAX).fetch_tree(&at.store, &tree).await.unwrap();
    assert_eq!(fs::read(held.path().join(WEIGHTS)).unwrap(), noise(1, 10));
}

#[tokio::test]
async fn a_file_damaged_in_the_cache_is_fetched_again() {
    let at = Place::file().await;
    let dir = tempfile::tempdir().unwrap();
    let ours = cache(&dir, u64::MAX);
    let tree = publish(&at, 1, 10).await;
    let weights = ours.fetch_tree(&at.store, &tree).await.unwrap().path().join(WEIGHTS);
    overwrite(&weights, b"0123456789");
    ours.fetch_tree(&at.store, &tree).await.unwrap();
    assert_eq!(fs::read(&weights).unwrap(), noise(1, 10), "a later write went unnoticed");
    // As by a failing disk: size and time are unchanged, but a new process hashes.
    let before = fs::metadata(&weights).unwrap().modified().unwrap();
    overwrite(&weights, b"0123456789");
    File::options().write(true).open(&weights).unwrap().set_modified(before).unwrap();
    cache(&dir, u64::MAX).fetch_tree(&at.store, &tree).await.unwrap();
    assert_eq!(fs::read(&weights).unwrap(), noise(1, 10), "old damage went unnoticed");
    fs::remove_file(&weights).unwrap();
    let manifest = weights.with_file_name("manifest.json");
    overwrite(&manifest, b"{}");
    cache(&dir, u64::MAX).fetch_tree(&at.store, &tree).await.unwrap();
    assert_eq!(fs::read(&weights).unwrap(), noise(1, 10), "a damaged tree was not rebuilt");
}

#[tokio::test]
async fn what_is_damaged_in_the_store_never_enters_the_cache() {
    for at in Place::all().await {
        let dir = tempfile::tempdir().unwrap();
        let tree = publish(&at, 1, 10).await;
        fs::write(at.dir.join(&tree.path).join(WEIGHTS), b"0123456789").unwrap();
        let error = cache(&dir, u64::MAX).fetch_tree(&at.store, &tree).await.unwrap_err();
        assert!(matches!(error, GetError::Corrupt { .. }), "{}", format_error_chain(&error));
        assert_eq!(fs::read_dir(dir.path().join("trees")).unwrap().count(), 0);
        assert_eq!(fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
    }
}

#[tokio::test]
async fn the_least_recently_used_goes_and_what_is_in_use_stays() {
    let at = Place::file().await;
    let dir = tempfile::tempdir().unwrap();
    let limit = 3 * MIB as u64;
    let cache = cache(&dir, limit);
    let mut trees = Vec::new();
    for seed in 0..4 {
        trees.push(publish(&at, seed, MIB - 4096).await);
    }
    let held = cache.fetch_tree(&at.store, &trees[0]).await.unwrap();
    for n in [1, 2, 1, 3] {
        cache.fetch_tree(&at.store, &trees[n]).await.unwrap();
        assert!(disk_use(dir.path()) <= limit);
    }
    let is_there = |tree: &v1::Tree| {
        dir.path().join("trees").join(tree.manifest.strip_prefix("b3:").unwrap()).exists()
    };
    assert_eq!([0, 1, 2, 3].map(|n| is_there(&trees[n])), [true, true, false, true]);
    assert_eq!(fs::read(held.path().join(WEIGHTS)).unwrap(), noise(0, MIB - 4096));
    drop(held);
    cache.fetch_tree(&at.store, &trees[2]).await.unwrap();
    assert!(!is_there(&trees[0]), "the oldest stayed after its last use");
}

#[tokio::test]
async fn what_cannot_fit_is_refused_before_it_is_fetched() {
    let at = Place::s3().await;
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(&dir, 3 * MIB as u64);
    let large = publish(&at, 1, 4 * MIB).await;
    let gets = at.count(&["GET", WEIGHTS]);
    let error = cache.fetch_tree(&at.store, &large).await.unwrap_err();
    assert!(
        matches!(error, GetError::Cache(CacheError::Full { .. })),
        "{}",
        format_error_chain(&error)
    );
    assert_eq!(at.count(&["GET", WEIGHTS]), gets);
    let one = cache.fetch_tree(&at.store, &publish(&at, 2, 2 * MIB).await).await.unwrap();
    let other = publish(&at, 3, 2 * MIB).await;
    let error = cache.fetch_tree(&at.store, &other).await.unwrap_err();
    assert!(
        error.is_transient() && format_error_chain(&error).contains("raise the limit"),
        "{}",
        format_error_chain(&error)
    );
    drop(one);
    cache.fetch_tree(&at.store, &other).await.unwrap();
}

#[tokio::test]
async fn what_a_killed_process_left_is_swept() {
    let at = Place::file().await;
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(&dir, u64::MAX);
    fs::write(dir.path().join("tmp/1-1"), noise(1, MIB)).unwrap();
    fs::create_dir_all(dir.path().join("tmp/1-2/tokenizer")).unwrap();
    fs::write(dir.path().join("locks/t-stale"), "").unwrap();
    let in_use = File::create(dir.path().join("tmp/1-3")).unwrap();
    in_use.lock_shared().unwrap();
    cache.fetch_tree(&at.store, &publish(&at, 1, 10).await).await.unwrap();
    let left =
        fs::read_dir(dir.path().join("tmp")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["1-3"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_users_of_a_small_cache_stay_within_its_bound_and_see_only_good_files() {
    const LEN: usize = 200_000;
    let at = Place::file().await;
    let dir = tempfile::tempdir().unwrap();
    let mut trees = Vec::new();
    for seed in 0..8 {
        trees.push(publish(&at, seed, LEN).await);
    }
    // Four trees in use, and a fifth to be fetched.
    let limit = 5 * 210_000;
    let users = (0..4usize).map(|user| {
        let (cache, store, trees) = (cache(&dir, limit), at.store.clone(), trees.clone());
        let dir = dir.path().to_owned();
        tokio::spawn(async move {
            for turn in 0..25 {
                let seed = (user * 3 + turn * turn) % trees.len();
                let held = cache.fetch_tree(&store, &trees[seed]).await.unwrap();
                let weights = fs::read(held.path().join(WEIGHTS)).unwrap();
                assert_eq!(weights, noise(seed as u64, LEN));
                assert!(disk_use(&dir) <= limit);
            }
        })
    });
    for user in users.collect::<Vec<_>>() {
        user.await.unwrap();
    }
}

#[tokio::test]
async fn a_tree_that_is_only_kept_has_the_digest_of_a_published_one_and_is_repaired() {
    let at = Place::file().await;
    let source = adapter(1, MIB);
    let published = at.store.publish_tree(source.path(), &place(1), about()).await.unwrap();
    let (dir, empty) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let cache = cache(&dir, u64::MAX);
    assert!(cache.find_tree(&published).await.unwrap().is_none());
    let keep = async || cache.keep_tree(source.path(), &place(1), about()).await.unwrap();
    assert_eq!(keep().await, published);
    for _ in 0..2 {
        let found = cache.find_tree(&published).await.unwrap().expect("kept");
        assert_eq!(fs::read(found.path().join(WEIGHTS)).unwrap(), noise(1, MIB));
        // As after a power loss.
        let path = found.path().join(WEIGHTS);
        drop(found);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "torn").unwrap();
        assert!(cache.find_tree(&published).await.unwrap().is_none());
        keep().await;
    }
    let nothing = Store::open(&format!("file://{}", empty.path().display())).await.unwrap();
    let found = cache.fetch_tree(&nothing, &published).await.unwrap();
    assert!(found.path().join(WEIGHTS).exists(), "needs no store");
}
