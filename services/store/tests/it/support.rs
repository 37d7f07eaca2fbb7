//! Stores to test against, files to publish, and what errors say.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use door_server::DoorServer;
use s3_server::S3Server;
use store::{Store, TreeMetadata, TreePlace};
use tempfile::TempDir;

pub(crate) const MIB: usize = 1 << 20;

/// A store, and the directory where its objects are files.
pub(crate) struct Place {
    pub(crate) store: Store,
    pub(crate) dir: PathBuf,
    pub(crate) s3: Option<S3Server>,
    /// Before either, where the store is reached through one.
    pub(crate) door: Option<DoorServer>,
    _root: Option<TempDir>,
}

impl Place {
    pub(crate) async fn file() -> Self {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a store");
        let store = Store::open(&format!("file://{}", dir.display())).await.unwrap();
        Self { store, dir, s3: None, door: None, _root: Some(root) }
    }

    pub(crate) async fn s3() -> Self {
        let server = S3Server::start().unwrap();
        let store = Store::open_with_env(&server.url(), server.env()).await.unwrap();
        Self { store, dir: server.dir(), s3: Some(server), door: None, _root: None }
    }

    /// The same store, through a door: as a member who may do all that members do.
    pub(crate) fn behind_a_door(self) -> Self {
        let env = self.s3.as_ref().map(S3Server::env).unwrap_or_default();
        let door = DoorServer::start(self.store.url(), env).unwrap();
        let store = Store::open_gateway(&door.door("box-1.trainer+operator").unwrap()).unwrap();
        Self { store, door: Some(door), ..self }
    }

    pub(crate) async fn all() -> [Self; 4] {
        [
            Self::file().await,
            Self::s3().await,
            Self::file().await.behind_a_door(),
            Self::s3().await.behind_a_door(),
        ]
    }

    /// As `box-2.evaluator` sees it.
    pub(crate) fn as_seen_by(&self, who: &str) -> Store {
        Store::open_gateway(&self.door.as_ref().unwrap().door(who).unwrap()).unwrap()
    }

    /// How many requests so far contain all the words; 0 for a directory.
    pub(crate) fn count(&self, words: &[&str]) -> usize {
        let requests = self.s3.as_ref().map(S3Server::requests).unwrap_or_default();
        requests.iter().filter(|request| words.iter().all(|word| request.contains(word))).count()
    }
}

/// Bytes that no two seeds share.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// A directory as a trainer leaves it, with weights of that size.
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

/// Where what an optimizer remembers lies, which alone is ever removed.
pub(crate) fn resume(step: u32) -> TreePlace {
    TreePlace::for_resume_state(&"raft-1".parse().unwrap(), 0, step)
}

pub(crate) fn about() -> TreeMetadata {
    TreeMetadata::from([("parents".to_owned(), serde_json::json!(["b3:00"]))])
}

/// The whole chain, as a person sees it.
pub(crate) use wire::format_error_chain as told;

/// Bytes of all files of a cache, each inode once. Under the lock without which nothing is
/// evicted or begun, or files that were never there together would be added up.
pub(crate) fn disk_use(cache: &Path) -> u64 {
    fn walk(dir: &Path, sizes: &mut BTreeMap<u64, u64>) {
        // Files move on while they are listed.
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
    let door = fs::File::open(cache.join("door")).unwrap();
    door.lock().unwrap();
    let mut sizes = BTreeMap::new();
    for part in ["tmp", "b3", "trees"] {
        walk(&cache.join(part), &mut sizes);
    }
    sizes.values().sum()
}
