//! A store and its blobs. Trees are in `tree`.

use std::{
    ffi::OsString,
    fmt,
    future::Future,
    path::{Path as FsPath, PathBuf},
    process,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use object_store::{ObjectStoreExt, path::Path};
use wire::{Digest, v1};

use crate::{
    door::Door,
    error::{CheckError, Fault, GetError, OpenError, PutError},
    location::{self, Location},
    parts::Parts,
    scan,
};

const CHECK_TIMEOUT: Duration = Duration::from_secs(15);

/// A place for immutable files. Clones share one connection pool.
#[derive(Clone)]
pub struct Store {
    pub(crate) at: Arc<Location>,
}

/// An object and what its bytes must be.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) key: Path,
    pub(crate) url: String,
    pub(crate) digest: Digest,
    pub(crate) bytes: u64,
    /// Where they are known: so that each can be had from anybody.
    pub(crate) parts: Option<Arc<Parts>>,
}

impl Store {
    /// `file:///directory` (created if absent) or `s3://bucket/prefix` with `AWS_*` from the
    /// environment. Touches no network: ask [`Store::check`] whether the store answers.
    ///
    /// # Errors
    /// When the URL or the environment cannot be used.
    pub async fn open(url: &str) -> Result<Self, OpenError> {
        // `vars` would panic on a variable of somebody else's that is not UTF-8.
        let text = |(name, value): (OsString, OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        let env: Vec<(String, String)> = std::env::vars_os().filter_map(text).collect();
        Self::open_with_env(url, env).await
    }

    /// As [`Store::open`], with the environment given.
    ///
    /// # Errors
    /// When the URL or the environment cannot be used.
    pub async fn open_with_env(
        url: &str,
        env: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, OpenError> {
        Ok(Self { at: Arc::new(location::open(url, env).await?) })
    }

    /// A fleet's store through its gateway. Touches no network.
    ///
    /// # Errors
    /// When the fleet's authority cannot be read, or the address is none.
    pub fn through(door: &Door) -> Result<Self, OpenError> {
        Ok(Self { at: Arc::new(location::through(door)?) })
    }

    /// As given to `open`, without a slash at its end; a gateway's address for a door.
    pub fn url(&self) -> &str {
        &self.at.url
    }

    /// Whether it is a directory of this machine, used as such.
    pub fn is_local(&self) -> bool {
        self.at.local.is_some()
    }

    /// Writes, reads and removes a small object, so that a wrong address, key or mode shows
    /// within seconds and not in the middle of a run. A gateway is asked whether it could, for
    /// not everybody may write.
    ///
    /// # Errors
    /// When the store refuses, does not answer, or gives back other bytes.
    pub async fn check(&self) -> Result<(), CheckError> {
        tokio::time::timeout(CHECK_TIMEOUT, self.probe()).await.unwrap_or_else(|_| {
            let url = self.at.url.clone();
            Err(CheckError::Silent { url, seconds: CHECK_TIMEOUT.as_secs() })
        })
    }

    async fn probe(&self) -> Result<(), CheckError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let text = format!("check-{}-{now}", process::id());
        let key = Path::from(text.as_str());
        let fault = |source| self.at.fault(&key, source);
        if let Some(door) = &self.at.door {
            return Ok(door.check().await.map_err(fault)?);
        }
        let objects = &self.at.objects;
        objects.put(&key, text.clone().into()).await.map_err(fault)?;
        let found = objects.get(&key).await.map_err(fault)?.bytes().await.map_err(fault)?;
        objects.delete(&key).await.map_err(fault)?;
        if found != text.as_bytes() {
            return Err(CheckError::Differs { url: self.at.url_of(&key) });
        }
        Ok(())
    }

    /// Stores a blob; one that is there already is left alone.
    ///
    /// # Errors
    /// When the store refuses or fails.
    pub async fn put_blob(&self, bytes: Bytes) -> Result<v1::Blob, PutError> {
        let hashed = bytes.clone();
        let digest = blocking(move || Digest::of(&hashed)).await;
        let size = bytes.len() as u64;
        let key = blob_key(digest);
        if !self.holds(&key, size).await? {
            self.put_bytes(&key, bytes).await?;
        }
        Ok(v1::Blob { digest: digest.to_string(), bytes: size })
    }

    /// As [`Store::put_blob`], from a file of any size in bounded memory.
    ///
    /// # Errors
    /// When the file cannot be read or changes, or the store refuses or fails.
    pub async fn put_blob_file(&self, path: &FsPath) -> Result<v1::Blob, PutError> {
        let (file, read) = (path.to_owned(), path.to_owned());
        let hashed = blocking(move || scan::hash_file(&file)).await;
        let (digest, size) = hashed.map_err(|source| PutError::Read { path: read, source })?;
        let key = blob_key(digest);
        if !self.holds(&key, size).await? {
            self.put_file(&key, path, digest, size).await?;
        }
        Ok(v1::Blob { digest: digest.to_string(), bytes: size })
    }

    /// The bytes of a blob of at most `limit` bytes, verified.
    ///
    /// # Errors
    /// When it is too large, missing or damaged, or the store fails.
    pub async fn get_blob(&self, blob: &v1::Blob, limit: u64) -> Result<Bytes, GetError> {
        let wanted = self.wanted_blob(blob)?;
        self.read_all(&wanted, limit).await
    }

    pub(crate) fn wanted_blob(&self, blob: &v1::Blob) -> Result<Wanted, GetError> {
        let digest = blob.digest.parse()?;
        let key = blob_key(digest);
        Ok(Wanted { url: self.at.url_of(&key), key, digest, bytes: blob.bytes, parts: None })
    }

    /// Whether an object of that size is there; its name says what its content should be.
    pub(crate) async fn holds(&self, key: &Path, size: u64) -> Result<bool, Fault> {
        match self.at.objects.head(key).await {
            Ok(meta) => Ok(meta.size == size),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(source) => Err(self.at.fault(key, source)),
        }
    }

    /// Where the object is a file of this machine.
    pub(crate) fn local_path(&self, key: &Path) -> Option<Result<PathBuf, Fault>> {
        let local = self.at.local.as_ref()?;
        Some(local.path_to_filesystem(key).map_err(|source| self.at.fault(key, source)))
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.url()).finish()
    }
}

fn blob_key(digest: Digest) -> Path {
    let hex = digest.to_hex();
    Path::from(format!("blobs/{}/{hex}", &hex[..2]))
}

/// Runs file work and hashing off the runtime's own threads.
pub(crate) fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = T> {
    let task = tokio::task::spawn_blocking(work);
    async {
        match task.await {
            Ok(value) => value,
            // Cancelled only when the runtime shuts down, which drops this future too.
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
}
