//! The hub's client library against a hub on loopback.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::TryStreamExt;
use hub::{
    BytesCallback, DatasetError, DatasetSplit, HubClient, HubError, ModelId, ModelRevision,
    PushOutcome, PushRequest, PushTarget, UploadFile,
};
use hub_server::{COMMIT, CONVERTED_COMMIT, HubServer, PART_BYTES};
use tempfile::TempDir;

fn serve(root: &Path) -> HubServer {
    let model = root.join("org/tiny");
    fs::create_dir_all(&model).unwrap();
    fs::write(model.join("config.json"), "{}").unwrap();
    fs::write(model.join("model.safetensors"), vec![7; 100_000]).unwrap();
    HubServer::start(root).unwrap()
}

fn id(text: &str) -> ModelId {
    text.parse().unwrap()
}

fn unheard() -> BytesCallback {
    Arc::new(|_| ())
}

/// The directory of the model in the cache.
fn folder(cache: &TempDir) -> PathBuf {
    cache.path().join("models--org--tiny")
}

/// The name of the blob of the weights, which is their SHA-256.
fn weights_blob(cache: &TempDir) -> PathBuf {
    let digest = ring::digest::digest(&ring::digest::SHA256, &[7; 100_000]);
    folder(cache).join("blobs").join(data_encoding::HEXLOWER.encode(digest.as_ref()))
}

#[tokio::test]
async fn a_file_is_downloaded_once_and_found_from_then_on() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = HubClient::with_endpoint(&server.url(), cache.path());
    assert_eq!(hub.find_snapshot(&id("org/tiny")).await, None);
    let config = hub.download_file(&id("org/tiny"), "config.json", unheard()).await.unwrap();
    let weights = hub.download_file(&id("org/tiny"), "model.safetensors", unheard()).await.unwrap();
    assert_eq!(fs::read(&weights).unwrap(), vec![7; 100_000]);
    let snapshot = hub.find_snapshot(&id("org/tiny")).await.unwrap();
    assert_eq!(config.parent(), Some(snapshot.as_path()));
    let revision = ModelRevision::from_snapshot_path(&snapshot).unwrap();
    assert_eq!((revision.repo.as_str(), revision.commit.as_str()), ("org/tiny", COMMIT));
    // A commit does not change, so no request is needed.
    let asked = server.requests().len();
    let pinned = id(&format!("org/tiny@{COMMIT}"));
    assert_eq!(hub.download_file(&pinned, "model.safetensors", unheard()).await.unwrap(), weights);
    assert_eq!(server.requests().len(), asked);
}

#[tokio::test]
async fn a_stream_continues_at_the_given_offset() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = HubClient::with_endpoint(&server.url(), cache.path());
    let revision = ModelRevision { repo: "org/tiny".into(), commit: COMMIT.into() };
    for (from, expected) in [(0, 100_000), (99_000, 1000)] {
        let chunks =
            hub.stream_file(&revision, "model.safetensors", (from, 100_000)).await.unwrap();
        let chunks: Vec<_> = chunks.try_collect().await.unwrap();
        assert_eq!(chunks.iter().map(|chunk| chunk.len()).sum::<usize>(), expected);
    }
}

#[tokio::test]
async fn a_missing_file_differs_from_an_unreachable_hub() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = HubClient::with_endpoint(&server.url(), cache.path());
    for (model, file) in [
        ("org/tiny", "tokenizer.json"),
        ("org/none", "config.json"),
        ("org/tiny@v2", "config.json"),
    ] {
        let error = hub.download_file(&id(model), file, unheard()).await.unwrap_err();
        assert!(matches!(error, HubError::Missing { .. }), "{model}: {error:?}");
        assert!(!error.is_transient() && error.to_string().contains(model), "{error}");
    }
    let url = server.url();
    drop(server);
    let away = HubClient::with_endpoint(&url, cache.path());
    let error = away.download_file(&id("org/tiny"), "config.json", unheard()).await.unwrap_err();
    assert!(matches!(error, HubError::Failed { .. }) && error.is_transient(), "{error:?}");
}

#[tokio::test]
async fn the_cache_has_the_layout_of_the_hub_s_own_tools() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    fs::create_dir_all(root.path().join("org/tiny/1_Pooling")).unwrap();
    fs::write(root.path().join("org/tiny/1_Pooling/config.json"), "{}").unwrap();
    let hub = HubClient::with_endpoint(&server.url(), cache.path());
    for name in ["config.json", "1_Pooling/config.json", "model.safetensors"] {
        hub.download_file(&id("org/tiny"), name, unheard()).await.unwrap();
    }
    let folder = folder(&cache);
    assert_eq!(fs::read_to_string(folder.join("refs/main")).unwrap(), COMMIT);
    let weights = weights_blob(&cache);
    let sha256 = weights.file_name().unwrap().to_str().unwrap();
    // The digest of `{}` as Git computes it.
    let blob = "9e26dfeeb6e641a33dae4961196235bdb965b21b";
    for (name, target) in [
        ("config.json", format!("../../blobs/{blob}")),
        ("1_Pooling/config.json", format!("../../../blobs/{blob}")),
        ("model.safetensors", format!("../../blobs/{sha256}")),
    ] {
        let link = folder.join("snapshots").join(COMMIT).join(name);
        assert_eq!(fs::read_link(&link).unwrap(), Path::new(&target));
        assert!(fs::read(link).is_ok());
    }
    let locks = cache.path().join(".locks/models--org--tiny");
    assert!(locks.join(format!("{sha256}.lock")).is_file());
}

#[tokio::test]
async fn a_download_continues_where_another_ended() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = HubClient::with_endpoint(&server.url(), cache.path());
    let partial = weights_blob(&cache).with_added_extension("incomplete");
    fs::create_dir_all(partial.parent().unwrap()).unwrap();
    fs::write(&partial, [7; 60_000]).unwrap();
    let first = Arc::new(Mutex::new(None));
    let seen = first.clone();
    let seen: BytesCallback = Arc::new(move |bytes| {
        seen.lock().unwrap().get_or_insert(bytes);
    });
    let path = hub.download_file(&id("org/tiny"), "model.safetensors", seen).await.unwrap();
    assert_eq!(fs::read(path).unwrap(), vec![7; 100_000]);
    assert!(first.lock().unwrap().unwrap() > 60_000);
    assert!(!partial.exists());
}

#[tokio::test]
async fn bytes_with_another_digest_never_get_a_name_and_are_fetched_again() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = HubClient::with_endpoint(&server.url(), cache.path());
    let blob = weights_blob(&cache);
    fs::create_dir_all(blob.parent().unwrap()).unwrap();
    fs::write(blob.with_added_extension("incomplete"), [8; 60_000]).unwrap();
    let download =
        async || hub.download_file(&id("org/tiny"), "model.safetensors", unheard()).await;
    let error = download().await.unwrap_err();
    let HubError::Failed { source, .. } = &error else { panic!("{error:?}") };
    assert!(source.to_string().contains("SHA-256") && error.is_transient(), "{error:?}");
    assert!(!blob.exists());
    assert_eq!(fs::read(download().await.unwrap()).unwrap(), vec![7; 100_000]);
}

#[tokio::test]
async fn a_blob_waits_for_another_process_that_downloads_it() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = HubClient::with_endpoint(&server.url(), cache.path());
    let blob = weights_blob(&cache);
    let name = blob.file_name().unwrap().to_str().unwrap();
    let locks = cache.path().join(".locks/models--org--tiny");
    fs::create_dir_all(&locks).unwrap();
    let lock = fs::File::create(locks.join(format!("{name}.lock"))).unwrap();
    lock.lock().unwrap();
    let mut waiting = tokio::spawn(async move {
        hub.download_file(&id("org/tiny"), "model.safetensors", unheard()).await
    });
    // A download takes a few milliseconds.
    assert!(tokio::time::timeout(Duration::from_millis(500), &mut waiting).await.is_err());
    fs::create_dir_all(blob.parent().unwrap()).unwrap();
    fs::write(&blob, "the other's").unwrap();
    drop(lock);
    assert_eq!(fs::read_to_string(waiting.await.unwrap().unwrap()).unwrap(), "the other's");
    assert!(!server.requests().iter().any(|request| request.starts_with("GET")));
}

#[tokio::test]
async fn the_token_is_sent_to_the_hub_alone() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = HubClient::with_endpoint(&server.url(), cache.path()).with_token("hf_secret");
    hub.download_file(&id("org/tiny"), "model.safetensors", unheard()).await.unwrap();
    let revision = ModelRevision { repo: "org/tiny".into(), commit: COMMIT.into() };
    let stream = hub.stream_file(&revision, "model.safetensors", (0, 100_000)).await.unwrap();
    stream.try_collect::<Vec<_>>().await.unwrap();
    let is_storage = |request: &String| request.contains("/storage/");
    assert_eq!(server.requests().iter().filter(|request| is_storage(request)).count(), 2);
    let with_token = server.requests_with_token();
    assert!(with_token.len() == 2 && !with_token.iter().any(is_storage), "{with_token:?}");
}

#[tokio::test]
async fn a_hub_that_is_away_leaves_what_the_cache_has() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = HubClient::with_endpoint(&server.url(), cache.path());
    let path = hub.download_file(&id("org/tiny"), "config.json", unheard()).await.unwrap();
    drop(server);
    assert_eq!(hub.download_file(&id("org/tiny"), "config.json", unheard()).await.unwrap(), path);
}

#[tokio::test]
async fn a_file_s_name_cannot_lead_out_of_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    let hub = HubClient::with_endpoint("http://127.0.0.1:9", cache.path());
    for name in ["../x", "/x", "a//b", "a/../b", "", "."] {
        let error = hub.download_file(&id("org/tiny"), name, unheard()).await.unwrap_err();
        let HubError::Failed { source, .. } = error else { panic!("{error:?}") };
        assert!(source.to_string().contains("not the path"), "{name}: {source}");
    }
}

/// Files to push, in a directory.
struct Local(TempDir);

impl Local {
    fn with_files(files: &[(&str, &[u8])]) -> Self {
        let local = Self(tempfile::tempdir().unwrap());
        files.iter().for_each(|(name, bytes)| local.write(name, bytes));
        local
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.0.path().join(name.replace('/', "_")), bytes).unwrap();
    }

    async fn push(
        &self,
        hub: &HubClient,
        target: &PushTarget,
        names: &[&str],
    ) -> Result<PushOutcome, HubError> {
        let files = names.iter().map(|name| {
            let source = self.0.path().join(name.replace('/', "_"));
            UploadFile { name: (*name).into(), source }
        });
        let request = PushRequest {
            message: "Add a model",
            files: &files.collect::<Vec<_>>(),
            is_replaced: |name| name.ends_with(".bin"),
            sent: Arc::new(|_| ()),
        };
        hub.push_files(target, &request).await
    }
}

const TOKEN: &str = "hf_secret";

fn writer(server: &HubServer, cache: &TempDir) -> HubClient {
    HubClient::with_endpoint(&server.url(), cache.path()).with_token(TOKEN)
}

fn count_requests(server: &HubServer, start: &str) -> usize {
    server.requests().iter().filter(|request| request.starts_with(start)).count()
}

#[tokio::test]
async fn pushed_files_are_what_others_download_and_are_sent_once() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = writer(&server, &cache);
    let large: Vec<u8> = (0..PART_BYTES * 2 + 5).map(|at| (at % 251) as u8).collect();
    let contents: [(&str, &[u8]); 5] = [
        ("README.md", b"# new"),
        ("empty.txt", b""),
        ("parts/one.bin", &large[..PART_BYTES]),
        ("parts/three.bin", &large),
        ("parts/same.bin", &large),
    ];
    let (local, names) = (Local::with_files(&contents), contents.map(|(name, _)| name));
    let new = id("org/new");
    let target = hub.open_push(&new, true).await.unwrap();
    assert!(!root.path().join("org/new").exists(), "opening a push changes nothing");
    let first = local.push(&hub, &target, &names).await.unwrap();
    assert!(first.is_new && first.changed.len() == 5 && first.removed.is_empty(), "{first:?}");
    assert_eq!(first.url, format!("{}/org/new/tree/main", server.url()));
    for (name, bytes) in contents {
        let path = hub.download_file(&new, name, unheard()).await.unwrap();
        assert_eq!(fs::read(path).unwrap(), bytes, "{name}");
    }
    assert_eq!(count_requests(&server, "PUT"), 1 + 3);

    // A push of the same files makes no commit, and one of another file sends that alone.
    let target = hub.open_push(&new, true).await.unwrap();
    let again = local.push(&hub, &target, &names).await.unwrap();
    assert_eq!((again.is_new, &again.commit), (false, &first.commit));
    assert!(again.changed.is_empty());
    local.write("README.md", b"# newer");
    let third = local.push(&hub, &target, &names[..4]).await.unwrap();
    assert_eq!(
        (&third.changed[..], &third.removed[..]),
        (&["README.md".into()][..], &["parts/same.bin".into()][..])
    );
    assert_ne!(third.commit, first.commit);
    assert_eq!(count_requests(&server, "PUT"), 1 + 3);
    assert_eq!(count_requests(&server, "POST /api/models/org/new/commit"), 2);
    assert!(!root.path().join("org/new/parts/same.bin").exists());
    assert!(!server.requests_with_token().iter().any(|request| request.contains("/storage/")));
}

#[tokio::test]
async fn a_push_to_a_new_branch_leaves_the_others_as_they_are() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = writer(&server, &cache);
    let local = Local::with_files(&[("config.json", b"{\"of\": \"dev\"}")]);
    let target = hub.open_push(&id("org/tiny@dev"), false).await.unwrap();
    local.push(&hub, &target, &["config.json"]).await.unwrap();
    for (model, expected) in [("org/tiny@dev", "{\"of\": \"dev\"}"), ("org/tiny", "{}")] {
        let path = hub.download_file(&id(model), "config.json", unheard()).await.unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), expected, "{model}");
    }
    for model in ["org/tiny", "org/tiny@other"] {
        let error = hub.open_push(&id(model), true).await.unwrap_err();
        assert!(matches!(error, HubError::Public { .. }), "{error:?}");
    }
}

#[tokio::test]
async fn a_branch_that_got_another_commit_is_left_as_it_is() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = writer(&server, &cache);
    let (mine, theirs) =
        (Local::with_files(&[("a.txt", b"mine")]), Local::with_files(&[("a.txt", b"theirs")]));
    let target = hub.open_push(&id("org/tiny"), false).await.unwrap();
    theirs.push(&hub, &target, &["a.txt"]).await.unwrap();
    let error = mine.push(&hub, &target, &["a.txt"]).await.unwrap_err();
    assert!(matches!(error, HubError::Conflict { .. }) && !error.is_transient(), "{error:?}");
    assert_eq!(fs::read_to_string(root.path().join("org/tiny/a.txt")).unwrap(), "theirs");
    // The hub itself compares the parent too.
    let target = hub.open_push(&id("org/tiny"), false).await.unwrap();
    server.refuse_next("/commit/", 1, 412, "A commit has happened since");
    let error = mine.push(&hub, &target, &["a.txt"]).await.unwrap_err();
    assert!(matches!(error, HubError::Conflict { .. }), "{error:?}");
}

#[tokio::test]
async fn a_repository_that_was_created_meanwhile_is_left_as_it_is() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = writer(&server, &cache);
    let (mine, theirs) =
        (Local::with_files(&[("a.txt", b"mine")]), Local::with_files(&[("a.txt", b"theirs")]));
    for (repo, is_private) in [("org/new", false), ("org/secret", true)] {
        let target = hub.open_push(&id(repo), is_private).await.unwrap();
        let other = hub.open_push(&id(repo), false).await.unwrap();
        theirs.push(&hub, &other, &["a.txt"]).await.unwrap();
        let error = mine.push(&hub, &target, &["a.txt"]).await.unwrap_err();
        match is_private {
            true => assert!(matches!(error, HubError::Public { .. }), "{error:?}"),
            false => assert!(matches!(error, HubError::Conflict { .. }), "{error:?}"),
        }
        let text = fs::read_to_string(root.path().join(repo).join("a.txt")).unwrap();
        assert_eq!(text, "theirs", "{repo}");
    }
}

#[tokio::test]
async fn a_renamed_repository_is_read_and_a_push_names_its_new_name() {
    let root = tempfile::tempdir().unwrap();
    serve_datasets(root.path());
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    server.rename_repository("old/tiny", "org/tiny");
    server.rename_repository("old/sums", "org/sums");
    let hub = writer(&server, &cache);
    let path = hub.download_file(&id("old/tiny"), "config.json", unheard()).await.unwrap();
    assert_eq!(fs::read_to_string(path).unwrap(), "{}");
    assert_eq!(contents(&download(&hub, "old/sums").await.unwrap()), ["first", "second"]);
    let error = hub.open_push(&id("old/tiny"), false).await.unwrap_err();
    assert_eq!(error.to_string(), "old/tiny was renamed to org/tiny; push to that name (H103)");
}

#[tokio::test]
async fn a_failing_hub_is_asked_again_and_keeps_the_branch_until_the_commit() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = writer(&server, &cache);
    let local = Local::with_files(&[("b.bin", &[3; 5000])]);
    let target = hub.open_push(&id("org/tiny"), false).await.unwrap();
    server.refuse_next("/commit/", 5, 503, "");
    let error = local.push(&hub, &target, &["b.bin"]).await.unwrap_err();
    assert!(matches!(error, HubError::Upload { .. }) && error.is_transient(), "{error:?}");
    assert!(!root.path().join("org/tiny/b.bin").exists());
    let before = count_requests(&server, "PUT");
    assert_eq!(before, 1, "the object is sent once");
    server.refuse_next("/preupload/", 1, 429, "slow down");
    assert!(local.push(&hub, &target, &["b.bin"]).await.unwrap().is_new);
    assert_eq!(count_requests(&server, "PUT"), before);
}

#[tokio::test]
async fn a_refused_push_names_what_the_user_can_do() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let local = Local::with_files(&[("c.txt", b"c")]);
    let anonymous = HubClient::with_endpoint(&server.url(), cache.path());
    let error = anonymous.open_push(&id("org/tiny"), false).await.unwrap_err();
    assert!(matches!(error, HubError::NoToken) && error.to_string().contains("hf auth login"));
    server.require_token(TOKEN);
    let hub = writer(&server, &cache);
    let target = hub.open_push(&id("org/tiny"), false).await.unwrap();
    let error = local.push(&hub.with_token("hf_old"), &target, &["c.txt"]).await.unwrap_err();
    assert!(matches!(error, HubError::UnknownToken { .. }), "{error:?}");
    for (status, message, code) in [
        (403, "You don't have write access to this repository", "H109"),
        (403, "Private repository storage limit reached", "H110"),
        (413, "exceeds your storage quota", "H110"),
        (404, "", "H103"),
    ] {
        server.refuse_next("/preupload/", 1, status, message);
        let error = local.push(&hub, &target, &["c.txt"]).await.unwrap_err();
        assert!(error.to_string().contains(code) && !error.is_transient(), "{error:?}");
    }
    assert!(!root.path().join("org/tiny/c.txt").exists());
}

/// Serves a data set with a conversion to parquet, and one without.
fn serve_datasets(root: &Path) -> HubServer {
    for (path, content) in [
        ("sums/train.jsonl", "original"),
        ("sums.parquet/default/test/0000.parquet", "test"),
        ("sums.parquet/default/train/0000.parquet", "first"),
        ("sums.parquet/default/train/0001.parquet", "second"),
        ("private-sums/data/train-00000-of-00001.parquet", "private"),
    ] {
        let path = root.join("datasets/org").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    HubServer::start(root).unwrap()
}

async fn download(hub: &HubClient, name: &str) -> Result<DatasetSplit, DatasetError> {
    hub.download_split(&name.parse().unwrap(), 1000, unheard()).await
}

fn contents(split: &DatasetSplit) -> Vec<String> {
    split.files.iter().map(|(_, path)| fs::read_to_string(path).unwrap()).collect()
}

#[tokio::test]
async fn a_split_is_that_of_the_conversion_unless_a_revision_is_named() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve_datasets(root.path()), tempfile::tempdir().unwrap());
    let hub = HubClient::with_endpoint(&server.url(), cache.path());
    let train = download(&hub, "org/sums").await.unwrap();
    assert_eq!(contents(&train), ["first", "second"]);
    let pinned = format!("org/sums@{CONVERTED_COMMIT}:default/train");
    assert_eq!(train.pinned.to_string(), pinned);
    assert_eq!(contents(&download(&hub, "org/sums:test").await.unwrap()), ["test"]);
    let original = download(&hub, "org/sums@main").await.unwrap();
    assert_eq!(contents(&original), ["original"]);
    assert_eq!(original.pinned.to_string(), format!("org/sums@{COMMIT}:default/train"));
    // A commit does not change, so no request is needed.
    let asked = server.requests().len();
    assert_eq!(download(&hub, &pinned).await.unwrap(), train);
    assert_eq!(server.requests().len(), asked);
    let folder = cache.path().join("datasets--org--sums");
    let link = folder.join("snapshots").join(CONVERTED_COMMIT).join("default/train/0000.parquet");
    assert_eq!(train.files[0].1, link);
    assert_eq!(
        fs::read_to_string(folder.join("refs/refs/convert/parquet")).unwrap(),
        CONVERTED_COMMIT
    );
}

#[tokio::test]
async fn a_split_is_bounded_also_if_the_hub_does_not_list_sizes() {
    let (root, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = serve_datasets(root.path());
    let hub = HubClient::with_endpoint(&server.url(), cache.path());
    server.hide_sizes();
    let limited = async |bytes_max| {
        let name = "org/sums".parse().unwrap();
        hub.download_split(&name, bytes_max, unheard()).await
    };
    // The texts of the two files.
    let bytes = ("first".len() + "second".len()) as u64;
    let assert_too_large = |outcome| match outcome {
        Err(DatasetError::TooLarge { count, limit, .. }) => {
            assert_eq!((count, limit), (bytes, bytes - 1));
        }
        other => panic!("{other:?}"),
    };
    assert_too_large(limited(bytes - 1).await);
    limited(bytes).await.unwrap();
    // Both are in the cache now.
    assert_too_large(limited(bytes - 1).await);
}

#[tokio::test]
async fn a_hub_that_is_away_leaves_whole_splits_alone() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve_datasets(root.path()), tempfile::tempdir().unwrap());
    let hub = HubClient::with_endpoint(&server.url(), cache.path()).with_token("hf_secret");
    let train = download(&hub, "org/sums").await.unwrap();
    let private = download(&hub, "org/private-sums").await.unwrap();
    drop(server);
    assert_eq!(download(&hub, "org/sums").await.unwrap(), train);
    assert_eq!(download(&hub, "org/private-sums").await.unwrap(), private);
    // The listing tells that the cache lacks a file.
    for name in ["org/sums:test", "org/none"] {
        let error = download(&hub, name).await.unwrap_err();
        assert!(matches!(&error, DatasetError::Hub(error) if error.is_transient()), "{error:?}");
    }
    fs::remove_file(&train.files[1].1).unwrap();
    let error = download(&hub, "org/sums").await.unwrap_err();
    assert!(matches!(&error, DatasetError::Hub(HubError::Failed { .. })), "{error:?}");
}

#[tokio::test]
async fn a_private_data_set_needs_the_token_which_goes_to_the_hub_alone() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve_datasets(root.path()), tempfile::tempdir().unwrap());
    let hub = HubClient::with_endpoint(&server.url(), cache.path());
    let error = download(&hub, "org/private-sums").await.unwrap_err();
    assert!(matches!(&error, DatasetError::Hub(HubError::Missing { .. })), "{error:?}");
    let file = root.path().join("datasets/org/private-sums/data/train-00000-of-00001.parquet");
    fs::write(file, vec![7; hub_server::LFS_BYTES]).unwrap();
    let hub = hub.with_token("hf_secret");
    let error = download(&hub, "org/private-sums").await.unwrap_err();
    assert!(error.to_string().contains("1024 bytes, the limit is 1000"), "{error}");
    let split = hub.download_split(&"org/private-sums".parse().unwrap(), 2000, unheard()).await;
    assert_eq!(fs::read(&split.unwrap().files[0].1).unwrap(), vec![7; 1024]);
    let is_storage = |request: &String| request.contains("/storage/");
    assert!(server.requests().iter().any(is_storage));
    assert!(!server.requests_with_token().iter().any(is_storage));
}

#[tokio::test]
async fn a_split_that_is_not_there_is_refused_with_those_that_are() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve_datasets(root.path()), tempfile::tempdir().unwrap());
    let hub = HubClient::with_endpoint(&server.url(), cache.path());
    for (name, words) in [
        ("org/sums:dev", "config \"default\" has test, train"),
        ("org/sums:en/train", "there are default"),
    ] {
        let DatasetError::Split { source, .. } = download(&hub, name).await.unwrap_err() else {
            panic!("{name}")
        };
        assert!(source.to_string().contains(words), "{source}");
    }
    for name in ["org/none", "org/sums@v2"] {
        let error = download(&hub, name).await.unwrap_err();
        assert!(matches!(&error, DatasetError::Hub(HubError::Missing { .. })), "{name}: {error:?}");
    }
}
