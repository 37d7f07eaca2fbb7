//! The hub's client library against a hub on loopback.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{fs, path::Path, sync::Arc};

use futures::TryStreamExt;
use hub::{HubClient, HubError, ModelId, ModelRevision};
use hub_server::{COMMIT, HubServer};

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

#[tokio::test]
async fn a_file_is_downloaded_once_and_found_from_then_on() {
    let root = tempfile::tempdir().unwrap();
    let (server, cache) = (serve(root.path()), tempfile::tempdir().unwrap());
    let hub = HubClient::with_endpoint(&server.url(), cache.path());
    assert_eq!(hub.find_snapshot(&id("org/tiny")).await.unwrap(), None);
    let seen: hub::BytesCallback = Arc::new(|_| ());
    let config = hub.download_file(&id("org/tiny"), "config.json", seen.clone()).await.unwrap();
    let weights =
        hub.download_file(&id("org/tiny"), "model.safetensors", seen.clone()).await.unwrap();
    assert_eq!(fs::read(&weights).unwrap(), vec![7; 100_000]);
    let snapshot = hub.find_snapshot(&id("org/tiny")).await.unwrap().unwrap();
    assert_eq!(config.parent(), Some(snapshot.as_path()));
    let revision = ModelRevision::from_snapshot_path(&snapshot).unwrap();
    assert_eq!((revision.repo.as_str(), revision.commit.as_str()), ("org/tiny", COMMIT));
    // A commit does not change, so no request is needed.
    let asked = server.requests().len();
    let pinned = id(&format!("org/tiny@{COMMIT}"));
    assert_eq!(hub.download_file(&pinned, "model.safetensors", seen).await.unwrap(), weights);
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
        let error = hub.download_file(&id(model), file, Arc::new(|_| ())).await.unwrap_err();
        assert!(matches!(error, HubError::Missing { .. }), "{model}: {error:?}");
        assert!(!error.is_transient() && error.to_string().contains(model), "{error}");
    }
    let url = server.url();
    drop(server);
    let away = HubClient::with_endpoint(&url, cache.path());
    let error =
        away.download_file(&id("org/tiny"), "config.json", Arc::new(|_| ())).await.unwrap_err();
    assert!(matches!(error, HubError::Failed { .. }) && error.is_transient(), "{error:?}");
}
