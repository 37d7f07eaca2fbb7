use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use hub::{HubClient, ModelRevision};
use hub_server::{COMMIT, HubServer};
use store::{
    DigestCache, ExternalSources, FileCache, GetError, PutError, RelativePath, Store, TreePlace,
    UploadMode,
};
use tempfile::TempDir;
use wire::v1;

use crate::support::{MIB, Place, disk_use, format_error_chain, noise};

const WEIGHTS: &str = "model.safetensors";

/// Writes a model directory with modification times an hour ago.
fn model(dir: &Path, seed: u64, len: usize) -> PathBuf {
    fs::create_dir_all(dir).unwrap();
    write(&dir.join("config.json"), format!("{{\"seed\": {seed}}}").as_bytes());
    write(&dir.join(WEIGHTS), &noise(seed, len));
    dir.to_owned()
}

fn write(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap();
    let hour_ago = SystemTime::now() - Duration::from_secs(3600);
    File::options().write(true).open(path).unwrap().set_modified(hour_ago).unwrap();
}

fn revision() -> ModelRevision {
    ModelRevision { repo: "org/tiny".into(), commit: COMMIT.into() }
}

async fn publish(
    store: &Store,
    dir: &Path,
    revision: Option<ModelRevision>,
    upload: UploadMode,
) -> Result<v1::Tree, PutError> {
    let names = ["config.json", WEIGHTS].map(|name| RelativePath::new(name).unwrap());
    let place = TreePlace::for_model("tiny").unwrap();
    let digests = Arc::new(DigestCache::at_path(dir.with_extension("digests")));
    store.publish_base((dir, &names), &place, revision, upload, (digests, Arc::new(|_| ()))).await
}

/// Opens an agent's cache with base models in these directories.
fn cache(dir: &TempDir, max_bytes: u64, models: &[&Path], hub: Option<HubClient>) -> FileCache {
    let models = models.iter().map(|path| (*path).to_owned()).collect();
    FileCache::open_with_sources(
        dir.path(),
        max_bytes,
        ExternalSources { models, hub, peers: None },
    )
    .unwrap()
}

fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn a_base_kept_elsewhere_is_its_manifest_in_the_store_and_the_users_files_on_the_box() {
    for at in Place::all().await {
        let (root, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let source = model(&root.path().join("tiny"), 1, 2 * MIB);
        let tree = publish(&at.store, &source, None, UploadMode::Nothing).await.unwrap();
        assert_eq!(names_in(&at.dir.join(&tree.path)), ["B3SUMS", "manifest.json"]);
        let examined = at.store.examine_tree(&tree).await.unwrap();
        assert_eq!(examined.defects, []);
        assert_eq!(Vec::from_iter(examined.external), ["config.json", WEIGHTS]);
        // A tenth of what the weights would take.
        let ours = cache(&dir, MIB as u64 / 5, &[root.path()], None);
        let held = ours.fetch_tree(&at.store, &tree).await.unwrap();
        let (linked, theirs) = (held.path().join(WEIGHTS), source.join(WEIGHTS));
        assert_eq!(fs::read(&linked).unwrap(), noise(1, 2 * MIB));
        assert_eq!(fs::metadata(&linked).unwrap().ino(), fs::metadata(&theirs).unwrap().ino());
        assert!(disk_use(dir.path()) < MIB as u64 / 10);
        drop(held);
        // The link is evicted with the next tree that needs the room; the user's file stays.
        let other = model(&root.path().join("other"), 2, MIB / 5 - 10_000);
        let other_tree = publish(&at.store, &other, None, UploadMode::Missing).await.unwrap();
        fs::remove_dir_all(&other).unwrap();
        ours.fetch_tree(&at.store, &other_tree).await.unwrap();
        assert_eq!(fs::read(&theirs).unwrap(), noise(1, 2 * MIB));
    }
}

#[tokio::test]
async fn a_file_changed_in_place_is_never_used_as_the_base() {
    let at = Place::file().await;
    let (root, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let source = model(&root.path().join("tiny"), 1, MIB);
    let elsewhere = publish(&at.store, &source, None, UploadMode::Nothing).await.unwrap();
    let stored = publish(&at.store, &source, None, UploadMode::Missing).await.unwrap();
    let ours = cache(&dir, u64::MAX, &[root.path()], None);
    ours.fetch_tree(&at.store, &elsewhere).await.unwrap();
    ours.fetch_tree(&at.store, &stored).await.unwrap();
    // As `rsync --inplace --times` does.
    let weights = source.join(WEIGHTS);
    let before = fs::metadata(&weights).unwrap();
    let open = File::options().write(true).open(&weights).unwrap();
    (&open).write_all(b"other").unwrap();
    open.set_modified(before.modified().unwrap()).unwrap();
    let error = ours.fetch_tree(&at.store, &elsewhere).await.unwrap_err();
    assert!(
        matches!(error, GetError::Unavailable { .. }) && !error.is_transient(),
        "{}",
        format_error_chain(&error)
    );
    for words in [WEIGHTS, "1048576 bytes", "--models", "base.upload: always", "copy it there"] {
        assert!(format_error_chain(&error).contains(words), "{}", format_error_chain(&error));
    }
    let held = ours.fetch_tree(&at.store, &stored).await.unwrap();
    let fetched = held.path().join(WEIGHTS);
    assert!(fs::symlink_metadata(&fetched).unwrap().is_file(), "still the user's changed file");
    assert_eq!(fs::read(&fetched).unwrap(), noise(1, MIB));
    // The other tree uses the file that the store delivered.
    ours.fetch_tree(&at.store, &elsewhere).await.unwrap();
}

#[tokio::test]
async fn a_hub_gives_what_neither_machine_nor_store_has() {
    let at = Place::file().await;
    let (root, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let source = model(&root.path().join("org/tiny"), 1, 3 * MIB);
    let server = HubServer::start(root.path()).unwrap();
    let hub = HubClient::with_endpoint(&server.url(), &dir.path().join("hub"));
    let tree = publish(&at.store, &source, Some(revision()), UploadMode::Nothing).await.unwrap();
    let ours = cache(&dir, 4 * MIB as u64, &[], Some(hub.clone()));
    let held = ours.fetch_tree(&at.store, &tree).await.unwrap();
    assert_eq!(fs::read(held.path().join(WEIGHTS)).unwrap(), noise(1, 3 * MIB));
    assert!(disk_use(dir.path()) >= 3 * MIB as u64, "a download counts like any other");
    drop(held);
    // The commit matches, the digest does not.
    let there = tempfile::tempdir().unwrap();
    write(&source.join(WEIGHTS), &noise(2, 3 * MIB));
    let error =
        cache(&there, u64::MAX, &[], Some(hub)).fetch_tree(&at.store, &tree).await.unwrap_err();
    let text = format_error_chain(&error);
    assert!(text.contains("has another digest") && text.contains("hf download org/tiny"), "{text}");
    let url = server.url();
    drop(server);
    let away = HubClient::with_endpoint(&url, &dir.path().join("hub"));
    let error =
        cache(&there, u64::MAX, &[], Some(away)).fetch_tree(&at.store, &tree).await.unwrap_err();
    assert!(
        matches!(error, GetError::Unavailable { .. }) && error.is_transient(),
        "{}",
        format_error_chain(&error)
    );
}

#[tokio::test]
async fn the_same_bytes_are_not_uploaded_twice() {
    let at = Place::s3().await;
    let root = tempfile::tempdir().unwrap();
    let source = model(&root.path().join("tiny"), 1, 40 * MIB);
    let first = publish(&at.store, &source, None, UploadMode::Missing).await.unwrap();
    let uploads = at.count(&["POST", "uploads"]);
    assert_eq!(uploads, 1);
    assert_eq!(publish(&at.store, &source, None, UploadMode::Missing).await.unwrap(), first);
    // Another tree, of the same weights.
    let second = publish(&at.store, &source, Some(revision()), UploadMode::Missing).await.unwrap();
    assert_ne!(second, first);
    assert_eq!(at.count(&["POST", "uploads"]), uploads);
    // A submission continues after an earlier one was killed before its manifest.
    let place = at.dir.join(&second.path);
    for name in ["manifest.json", "config.json"] {
        fs::remove_file(place.join(name)).unwrap();
    }
    fs::remove_dir_all(at.dir.join(&first.path)).unwrap();
    assert_eq!(
        publish(&at.store, &source, Some(revision()), UploadMode::Missing).await.unwrap(),
        second
    );
    assert_eq!(at.count(&["POST", "uploads"]), uploads);
    assert_eq!(at.store.examine_tree(&second).await.unwrap().defects, []);
    // With `UploadMode::All` all files are sent: a store may have lost some.
    fs::write(place.join(WEIGHTS), noise(3, 40 * MIB)).unwrap();
    publish(&at.store, &source, Some(revision()), UploadMode::All).await.unwrap();
    assert_eq!(fs::read(place.join(WEIGHTS)).unwrap(), noise(1, 40 * MIB));
}

#[tokio::test]
async fn a_directory_that_was_copied_into_the_store_becomes_a_tree_in_place() {
    for at in Place::all().await {
        let dir = tempfile::tempdir().unwrap();
        let there = model(&at.dir.join("mirror/tiny"), 1, 20 * MIB);
        fs::write(there.join("README.md"), "theirs").unwrap();
        let root = RelativePath::new("mirror/tiny").unwrap();
        let found = at.store.read_directory(&root).await.unwrap();
        assert!(found.published.is_none());
        let names: BTreeMap<_, _> =
            found.files.into_iter().filter(|(name, _)| name != "README.md").collect();
        let before = fs::metadata(there.join(WEIGHTS)).unwrap().ino();
        let tree = at.store.register_in_place(&root, &names, &|_| ()).await.unwrap();
        assert_eq!((tree.path.as_str(), names.len()), ("mirror/tiny", 2));
        assert_eq!(fs::metadata(there.join(WEIGHTS)).unwrap().ino(), before);
        assert_eq!(at.store.examine_tree(&tree).await.unwrap().defects, []);
        let held = cache(&dir, u64::MAX, &[], None).fetch_tree(&at.store, &tree).await.unwrap();
        assert_eq!(fs::read(held.path().join(WEIGHTS)).unwrap(), noise(1, 20 * MIB));
        let again = at.store.read_directory(&root).await.unwrap().published.unwrap();
        assert_eq!(again.0, tree);
        // Another model is copied over it.
        fs::write(there.join(WEIGHTS), noise(2, 20 * MIB)).unwrap();
        let other = tempfile::tempdir().unwrap();
        let error =
            cache(&other, u64::MAX, &[], None).fetch_tree(&at.store, &tree).await.unwrap_err();
        assert!(matches!(error, GetError::Corrupt { .. }), "{}", format_error_chain(&error));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_that_share_a_cache_share_what_they_found() {
    let at = Place::s3().await;
    let (root, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let source = model(&root.path().join("tiny"), 1, MIB);
    let tree = publish(&at.store, &source, None, UploadMode::Missing).await.unwrap();
    let gets = at.count(&["GET", WEIGHTS]);
    let agents = (0..4).map(|_| {
        let (cache, store, tree) =
            (cache(&dir, u64::MAX, &[root.path()], None), at.store.clone(), tree.clone());
        tokio::spawn(async move {
            for _ in 0..8 {
                let held = cache.fetch_tree(&store, &tree).await.unwrap();
                assert_eq!(fs::read(held.path().join(WEIGHTS)).unwrap(), noise(1, MIB));
            }
        })
    });
    for agent in agents.collect::<Vec<_>>() {
        agent.await.unwrap();
    }
    assert_eq!(at.count(&["GET", WEIGHTS]), gets);
    // Config and weights, hashed by one of the four.
    let lines = fs::read_to_string(dir.path().join("digests.jsonl")).unwrap();
    assert_eq!(lines.lines().filter(|line| !line.is_empty()).count(), 2);
    assert_eq!(names_in(&dir.path().join("tmp")), [""; 0]);
}

#[tokio::test]
async fn one_file_of_a_base_is_had_without_the_rest_wherever_it_is() {
    for (upload, is_here) in [(UploadMode::Missing, false), (UploadMode::Nothing, true)] {
        let at = Place::file().await;
        let (root, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let model = model(&root.path().join("models/tiny"), 7, MIB);
        let tree = publish(&at.store, &model, None, upload).await.unwrap();
        let models = [root.path()];
        let cache = cache(&dir, 64 << 20, if is_here { &models } else { &[] }, None);
        let of =
            async |name, limit| cache.read_tree_file(&at.store, &tree, name, limit).await.unwrap();
        assert_eq!(of("config.json", 100).await.unwrap(), b"{\"seed\": 7}");
        assert_eq!(of("config.json", 3).await, None, "larger than was asked for");
        assert_eq!(of("no-such.json", 100).await, None);
        assert!(names_in(&dir.path().join("b3")).len() <= 1, "the weights were not fetched");
        assert!(names_in(&dir.path().join("trees")).is_empty());
        // A complete tree needs no store.
        let held = cache.fetch_tree(&at.store, &tree).await.unwrap();
        fs::remove_dir_all(&at.dir).unwrap();
        assert_eq!(of("config.json", 100).await.unwrap(), b"{\"seed\": 7}");
        drop(held);
    }
}
