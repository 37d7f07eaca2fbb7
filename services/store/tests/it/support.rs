//! Stores to test against, and files to publish.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use s3_server::S3Server;
use store::{Store, TreeMetadata, TreePlace};
use store_proxy_server::StoreProxyServer;
use tempfile::TempDir;

pub(crate) const MIB: usize = 1 << 20;

/// A store, and the directory where its objects are files.
pub(crate) struct Place {
    pub(crate) store: Store,
    pub(crate) dir: PathBuf,
    pub(crate) s3: Option<S3Server>,
    /// The gateway in front of the store, if there is one.
    pub(crate) proxy: Option<StoreProxyServer>,
    _root: Option<TempDir>,
}

impl Place {
    pub(crate) async fn file() -> Self {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a store");
        let store = Store::open(&format!("file://{}", dir.display())).await.unwrap();
        Self { store, dir, s3: None, proxy: None, _root: Some(root) }
    }

    pub(crate) async fn s3() -> Self {
        let server = S3Server::start().unwrap();
        let store = Store::open_with_env(&server.url(), server.env()).await.unwrap();
        Self { store, dir: server.dir(), s3: Some(server), proxy: None, _root: None }
    }

    /// Opens the same store through a gateway, as a member with all rights of members.
    pub(crate) fn behind_proxy(self) -> Self {
        let env = self.s3.as_ref().map(S3Server::env).unwrap_or_default();
        let proxy = StoreProxyServer::start(self.store.url(), env).unwrap();
        let store =
            Store::open_gateway(&proxy.gateway_store("box-1.trainer+operator").unwrap()).unwrap();
        Self { store, proxy: Some(proxy), ..self }
    }

    pub(crate) async fn all() -> [Self; 4] {
        [
            Self::file().await,
            Self::s3().await,
            Self::file().await.behind_proxy(),
            Self::s3().await.behind_proxy(),
        ]
    }

    /// Opens the store as a member such as `box-2.evaluator`.
    pub(crate) fn as_seen_by(&self, who: &str) -> Store {
        Store::open_gateway(&self.proxy.as_ref().unwrap().gateway_store(who).unwrap()).unwrap()
    }

    /// Counts the requests that contain all the words; 0 for a directory.
    pub(crate) fn count(&self, words: &[&str]) -> usize {
        let requests = self.s3.as_ref().map(S3Server::requests).unwrap_or_default();
        requests.iter().filter(|request| words.iter().all(|word| request.contains(word))).count()
    }
}

/// Returns bytes that differ between seeds.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Creates a trainer's output directory with weights of `len` bytes.
pub(crate) fn adapter(seed: u64, len: usize) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("adapter_model.safetensors"), noise(seed, len)).unwrap();
    fs::write(dir.path().join("adapter_config.json"), r#"{"r": 8}"#).unwrap();
    fs::create_dir(dir.path().join("tokenizer")).unwrap();
    fs::write(dir.path().join("tokenizer/vocab.txt"), "").unwrap();
    dir
}

pub(crate) fn place(step: u32) -> TreePlace {
    TreePlace::for_checkpoint(&"raft-1".parse().unwrap(), 0, step)
}

/// Returns the place of an optimizer's state, the only trees that are removed.
pub(crate) fn resume(step: u32) -> TreePlace {
    TreePlace::for_resume_state(&"raft-1".parse().unwrap(), 0, step)
}

pub(crate) fn about() -> TreeMetadata {
    TreeMetadata::from([("parents".to_owned(), serde_json::json!(["b3:00"]))])
}

pub(crate) use wire::format_error_chain;

/// Returns the bytes of all files of a cache, each inode once. Holds the lock under which files are
/// created and evicted.
pub(crate) fn disk_use(cache: &Path) -> u64 {
    fn walk(dir: &Path, sizes: &mut BTreeMap<u64, u64>) {
        // Files move while they are listed.
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(meta) if meta.is_dir() => walk(&entry.path(), sizes),
                Ok(meta) => {
                    sizes.insert(meta.ino(), meta.len());
                }
                Err(_) => {}
            }
        }
    }
    let lock = fs::File::open(cache.join("door")).unwrap();
    lock.lock().unwrap();
    let mut sizes = BTreeMap::new();
    for part in ["tmp", "b3", "trees"] {
        walk(&cache.join(part), &mut sizes);
    }
    sizes.values().sum()
}
