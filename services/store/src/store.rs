//! A store and its blobs. Module `tree` contains the operations on trees.

use std::{
    ffi::OsString,
    fmt,
    path::{Path as FsPath, PathBuf},
    process,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use object_store::{ObjectStoreExt, path::Path};
use wire::{Digest, v1};

use crate::{
    backend::{self, StoreBackend},
    blocking::run_blocking,
    error::{CheckError, GetError, OpenError, PutError, StorageError},
    gateway_store::GatewayStore,
    parts::PartHashes,
    scan,
};

const CHECK_TIMEOUT: Duration = Duration::from_secs(15);

/// A store of immutable files: a directory, an S3 bucket, or a fleet's store behind its gateway.
/// Clones share one connection pool.
///
/// It contains blobs (one file, named by its digest) and trees (directories, named by the digest of
/// their manifest). Every read is verified against a digest; every write is atomic.
///
/// ```text
/// let store = Store::open("s3://bucket/prefix").await?;
/// store.check_access().await?;
/// let tree = store.publish_tree(dir, &place, metadata).await?;   // a writer
/// let cached = cache.fetch_tree(&store, &tree).await?;           // a reader
/// ```
#[derive(Clone)]
pub struct Store {
    pub(crate) backend: Arc<StoreBackend>,
}

#[derive(Debug, Clone)]
pub(crate) struct WantedObject {
    pub(crate) key: Path,
    pub(crate) url: String,
    pub(crate) digest: Digest,
    pub(crate) bytes: u64,
    /// If known, each part may be fetched from any peer.
    pub(crate) parts: Option<Arc<PartHashes>>,
}

impl Store {
    /// Opens `file:///directory` (created if absent) or `s3://bucket/prefix` with `AWS_*` from the
    /// environment. Touches no network; use [`Store::check_access`] to check that the store
    /// answers.
    pub async fn open(url: &str) -> Result<Self, OpenError> {
        // `vars` would panic on a variable that is not UTF-8.
        let text = |(name, value): (OsString, OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        let env: Vec<(String, String)> = std::env::vars_os().filter_map(text).collect();
        Self::open_with_env(url, env).await
    }

    /// Opens a store as [`Store::open`] does, with the given environment.
    pub async fn open_with_env(
        url: &str,
        env: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, OpenError> {
        Ok(Self { backend: Arc::new(backend::open_backend(url, env).await?) })
    }

    /// Opens a fleet's store through its gateway. Touches no network.
    pub fn open_gateway(gateway: &GatewayStore) -> Result<Self, OpenError> {
        Ok(Self { backend: Arc::new(backend::open_gateway(gateway)?) })
    }

    /// Returns the URL given to `open` without a slash at its end, or the gateway's URL of the
    /// store.
    pub fn url(&self) -> &str {
        &self.backend.url
    }

    /// Returns true if the store is a directory of this machine.
    pub fn is_local(&self) -> bool {
        self.backend.local.is_some()
    }

    /// Writes, reads and removes a small object, so that a wrong address, key or mode shows at
    /// once. Fails after 15 s. For a gateway it only checks that the gateway reaches the store,
    /// because not every member may write.
    pub async fn check_access(&self) -> Result<(), CheckError> {
        tokio::time::timeout(CHECK_TIMEOUT, self.probe_access()).await.unwrap_or_else(|_| {
            let url = self.backend.url.clone();
            Err(CheckError::Silent { url, seconds: CHECK_TIMEOUT.as_secs() })
        })
    }

    async fn probe_access(&self) -> Result<(), CheckError> {
        let now = wire::clock::unix_time().as_nanos();
        let text = format!("check-{}-{now}", process::id());
        let key = Path::from(text.as_str());
        let fault = |source| self.backend.storage_error(&key, source);
        if let Some(gateway) = &self.backend.gateway {
            return Ok(gateway.check_access().await.map_err(fault)?);
        }
        let objects = &self.backend.objects;
        objects.put(&key, text.clone().into()).await.map_err(fault)?;
        let found = objects.get(&key).await.map_err(fault)?.bytes().await.map_err(fault)?;
        objects.delete(&key).await.map_err(fault)?;
        if found != text.as_bytes() {
            return Err(CheckError::Differs { url: self.backend.object_url(&key) });
        }
        Ok(())
    }

    /// Stores a blob, unless it exists already.
    pub async fn put_blob(&self, bytes: Bytes) -> Result<v1::Blob, PutError> {
        let hashed = bytes.clone();
        let digest = run_blocking(move || Digest::hash_bytes(&hashed)).await;
        let size = bytes.len() as u64;
        let key = blob_key(digest);
        if !self.has_object(&key, size).await? {
            self.put_bytes(&key, bytes).await?;
        }
        Ok(v1::Blob { digest: digest.to_string(), bytes: size })
    }

    /// Stores a file of any size as a blob, in bounded memory, unless it exists already.
    pub async fn put_blob_file(&self, path: &FsPath) -> Result<v1::Blob, PutError> {
        let (file, read) = (path.to_owned(), path.to_owned());
        let hashed = run_blocking(move || scan::hash_path(&file)).await;
        let (digest, size) = hashed.map_err(|source| PutError::Read { path: read, source })?;
        let key = blob_key(digest);
        if !self.has_object(&key, size).await? {
            self.put_file(&key, path, digest, size).await?;
        }
        Ok(v1::Blob { digest: digest.to_string(), bytes: size })
    }

    /// Returns the verified bytes of a blob of at most `limit` bytes.
    pub async fn get_blob(&self, blob: &v1::Blob, limit: u64) -> Result<Bytes, GetError> {
        let wanted = self.wanted_blob(blob)?;
        self.read_verified(&wanted, limit).await
    }

    pub(crate) fn wanted_blob(&self, blob: &v1::Blob) -> Result<WantedObject, GetError> {
        let digest = blob.digest.parse()?;
        let key = blob_key(digest);
        Ok(WantedObject {
            url: self.backend.object_url(&key),
            key,
            digest,
            bytes: blob.bytes,
            parts: None,
        })
    }

    /// Checks only the size; the name contains the digest.
    pub(crate) async fn has_object(&self, key: &Path, size: u64) -> Result<bool, StorageError> {
        match self.backend.objects.head(key).await {
            Ok(meta) => Ok(meta.size == size),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(source) => Err(self.backend.storage_error(key, source)),
        }
    }

    pub(crate) fn local_path(&self, key: &Path) -> Option<Result<PathBuf, StorageError>> {
        let local = self.backend.local.as_ref()?;
        Some(
            local.path_to_filesystem(key).map_err(|source| self.backend.storage_error(key, source)),
        )
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.url()).finish()
    }
}

/// Returns the key of a blob: `blobs/<aa>/<hex>`.
fn blob_key(digest: Digest) -> Path {
    let hex = digest.to_hex();
    Path::from(format!("blobs/{}/{hex}", &hex[..2]))
}
