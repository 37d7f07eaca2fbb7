//! The hub's client library against a hub on loopback.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::TryStreamExt;
use hub::{BytesCallback, HubClient, HubError, ModelId, ModelRevision, UploadFile};
use hub_server::{COMMIT, HubServer, PART_BYTES};
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

#[tokio::test]
async fn uploaded_files_are_what_others_download() {
    let (root, local) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = HubClient::with_endpoint(&server.url(), cache.path()).with_token("hf_secret");
    let large: Vec<u8> = (0..PART_BYTES * 2 + 5).map(|at| (at % 251) as u8).collect();
    let contents: [(&str, &[u8]); 5] = [
        ("README.md", b"# new"),
        ("empty.txt", b""),
        ("parts/one.bin", &large[..PART_BYTES]),
        ("parts/three.bin", &large),
        ("parts/same.bin", &large),
    ];
    let files = contents.map(|(name, bytes)| {
        let source = local.path().join(name.replace('/', "_"));
        fs::write(&source, bytes).unwrap();
        UploadFile { name: name.into(), source }
    });
    let upload = async || hub.upload_files(&id("org/new"), "Add a model", &files).await;
    let error = upload().await.unwrap_err();
    assert!(matches!(error, HubError::Upload { .. }) && !error.is_transient(), "{error:?}");
    for _ in 0..2 {
        hub.create_repository("org/new", true).await.unwrap();
    }
    assert_eq!(upload().await.unwrap(), COMMIT);
    for (name, bytes) in contents {
        let path = hub.download_file(&id("org/new"), name, unheard()).await.unwrap();
        assert_eq!(fs::read(path).unwrap(), bytes, "{name}");
    }
    let sent = || server.requests().iter().filter(|request| request.starts_with("PUT")).count();
    assert_eq!(sent(), 1 + 3);
    upload().await.unwrap();
    assert_eq!(sent(), 1 + 3, "the storage has the objects");
    assert!(!server.requests_with_token().iter().any(|request| request.contains("/storage/")));
}
