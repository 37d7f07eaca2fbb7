//! Errors of this crate, one enum per operation. [`StorageError`] is a failed request to the
//! storage itself.

use std::{error::Error as StdError, io, path::PathBuf};

use hub::ModelRevision;

use crate::{
    gateway_store::GatewayRefusal,
    manifest::{ManifestError, TreeFile, TreeManifest},
    path::PathError,
};

/// The underlying error of a storage request.
type ErrorSource = Box<dyn StdError + Send + Sync>;

/// A request that the storage did not fulfil, for any kind of storage.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The storage rejected the credentials or the file permissions.
    #[error(
        "{url} refuses access: check who may read and write there (AWS_ACCESS_KEY_ID and its \
         policy, or the directory's owner and mode) (S102)"
    )]
    Denied { url: String, source: ErrorSource },
    /// The fleet's gateway refused the request; the source is the gateway's message.
    #[error("the fleet's gateway refuses {url} (S102)")]
    Refused { url: String, source: ErrorSource },
    /// The disk or the quota is full.
    #[error("{url} has no space left: free some, or raise the quota (S103)")]
    Full { url: String, source: ErrorSource },
    /// The object does not exist.
    #[error("{url} is not there (S104)")]
    Missing { url: String, source: ErrorSource },
    /// The storage is unreachable or failed for another reason.
    #[error("cannot reach {url}, or it failed (S105)")]
    Failed { url: String, source: ErrorSource },
}

/// The reason why a store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The URL cannot be used.
    #[error("cannot use {url:?} as a store: {reason} (S101)")]
    Url { url: String, reason: String },
    /// The directory of the store cannot be created.
    #[error("cannot create the store's directory {} (S101)", path.display())]
    Directory { path: PathBuf, source: io::Error },
    /// The environment contains no credentials for S3.
    #[error(
        "no credentials for {url}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles in \
         ~/.aws are not read), AWS_WEB_IDENTITY_TOKEN_FILE, AWS_METADATA_ENDPOINT for an \
         instance's own, or AWS_SKIP_SIGNATURE=true for a public bucket (S101)"
    )]
    Credentials { url: String },
    /// The client cannot be set up from the environment.
    #[error("cannot set up {url} from the AWS_* environment (S101)")]
    Settings { url: String, source: ErrorSource },
}

/// The reason why the check of a store failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// A request failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The store returned other bytes than were written.
    #[error("{url} gave back other bytes than were written: do not use this store (S106)")]
    Differs { url: String },
    /// The store did not answer within the limit.
    #[error(
        "{url} did not answer within {seconds} s: check the address (AWS_ENDPOINT, or the gateway's) (S105)"
    )]
    Silent { url: String, seconds: u64 },
}

/// The reason why a blob or tree was not published.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// A request to the storage failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A file of this machine cannot be read.
    #[error("cannot read {} to publish it", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The directory contains something other than files and directories.
    #[error("cannot publish {}: it is neither a regular file nor a directory (S108)", path.display())]
    Kind { path: PathBuf },
    /// The directory contains no files.
    #[error("cannot publish {}: it holds no files (S108)", path.display())]
    Empty { path: PathBuf },
    /// A file name may not be used in the store.
    #[error("cannot publish {}", path.display())]
    Path { path: PathBuf, source: PathError },
    /// The files cannot be described in a manifest.
    #[error("cannot describe {} in a manifest", path.display())]
    Manifest { path: PathBuf, source: ManifestError },
    /// A file changed while it was published.
    #[error("{} changed while it was published: publish it again when it is complete (S108)", path.display())]
    Changed { path: PathBuf },
    /// The place contains a manifest that does not match its name.
    #[error(
        "{url} holds another manifest than its name says: remove that directory and publish again (S106)"
    )]
    Occupied { url: String },
}

/// The reason why a blob, a tree or a file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum GetError {
    /// A request to the storage failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The local cache failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A fact contains a malformed digest.
    #[error("cannot fetch what a fact names")]
    Digest(#[from] wire::DigestError),
    /// A fact contains a path that may not be used in the store.
    #[error("cannot fetch what a fact names")]
    Path(#[from] PathError),
    /// The received bytes do not match the digest or the size.
    #[error(
        "{url} is damaged: expected {expected}, found {found}; restore or remove that object, \
         then publish it again (S106)"
    )]
    Corrupt {
        url: String,
        expected: String,
        found: String,
        /// As many bytes as expected, but others: the way here may be at fault.
        same_size: bool,
    },
    /// The object is larger than the caller allows.
    #[error("{url} has {bytes} bytes, more than the {limit} allowed here (S107)")]
    TooLarge { url: String, bytes: u64, limit: u64 },
    /// The manifest of the tree cannot be used.
    #[error("cannot use the manifest {url}")]
    Manifest { url: String, source: ManifestError },
    /// The tree has no file with this path.
    #[error("the tree {url} has no file {path:?} (S104)")]
    NoSuchFile { url: String, path: String },
    /// A file of a base model is neither in the store, nor on this machine, nor on the hub.
    #[error(
        "the base's {file} ({bytes} bytes, {digest}) cannot be found: {tried}; put the model's \
         directory below one that the agent's --models names, or {download}, or submit it again \
         with base.upload: always (S104)"
    )]
    Unavailable {
        file: String,
        bytes: u64,
        digest: String,
        /// What was tried, and what came of it.
        tried: String,
        /// What a person may do about it.
        download: String,
        may_pass: bool,
    },
}

/// A failure of the local cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// A file operation failed.
    #[error("cannot {doing} {} in the cache: check its owner, mode and file system (S110)", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    /// The disk of the cache is full.
    #[error("the disk of the cache {} is full: free some space (S110)", path.display())]
    DiskFull { path: PathBuf, source: io::Error },
    /// The cache limit leaves no room, because the rest is in use.
    #[error(
        "{needed} bytes do not fit into the cache {}: its limit is {limit} and {in_use} are in \
         use; raise the limit or wait for jobs to end (S110)", path.display()
    )]
    Full { path: PathBuf, needed: u64, limit: u64, in_use: u64 },
}

/// The reason why a tree was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// A request to the storage failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A fact contains a malformed digest.
    #[error("cannot remove what a fact names")]
    Digest(#[from] wire::DigestError),
    /// The tree is not at the only place where it may be removed.
    #[error("the tree {path:?} is not at {expected:?}, where alone it may be removed (S109)")]
    WrongPlace { path: String, expected: String },
}

impl StorageError {
    /// Returns true if the object does not exist.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }

    /// Returns true if the same request may succeed later without an intervention here.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Failed { .. } | Self::Full { .. })
    }

    /// Converts an error of `object_store` and classifies it.
    pub(crate) fn new(url: String, source: object_store::Error) -> Self {
        use object_store::Error as E;
        match source {
            E::NotFound { source, .. } => Self::Missing { url, source },
            E::PermissionDenied { source, .. } if source.is::<GatewayRefusal>() => {
                Self::Refused { url, source }
            }
            E::PermissionDenied { source, .. } | E::Unauthenticated { source, .. } => {
                Self::Denied { url, source }
            }
            // The text of a generic error only repeats the text of its source.
            E::Generic { source, .. } => Self::from_kind(url, find_io_kind(&*source), source),
            other => Self::from_kind(url, find_io_kind(&other), Box::new(other)),
        }
    }

    /// Converts an I/O error of a store that is a directory.
    pub(crate) fn from_io(url: String, source: io::Error) -> Self {
        Self::from_kind(url, Some(source.kind()), Box::new(source))
    }

    /// Classifies an error by its I/O kind, and a full server by the error codes in its text.
    fn from_kind(url: String, kind: Option<io::ErrorKind>, source: ErrorSource) -> Self {
        use io::ErrorKind as K;
        let text = source.to_string();
        match kind {
            Some(K::NotFound) => Self::Missing { url, source },
            Some(K::StorageFull | K::QuotaExceeded) => Self::Full { url, source },
            Some(K::PermissionDenied | K::ReadOnlyFilesystem) => Self::Denied { url, source },
            _ if FULL_ERROR_CODES.iter().any(|word| text.contains(word)) => {
                Self::Full { url, source }
            }
            _ => Self::Failed { url, source },
        }
    }
}

/// Error codes of S3 servers (Ceph, MinIO, Garage, R2) for a full disk or quota.
const FULL_ERROR_CODES: [&str; 3] = ["StorageFull", "InsufficientStorage", "QuotaExceeded"];

/// Returns the kind of the first I/O error in a chain of sources, if any.
fn find_io_kind(error: &(dyn StdError + 'static)) -> Option<io::ErrorKind> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return Some(io.kind());
        }
        next = error.source();
    }
    None
}

impl GetError {
    /// Builds the error for a base model's file that no source has, with the remedies.
    pub(crate) fn unavailable_file(
        manifest: &TreeManifest,
        file: &TreeFile,
        tried: String,
    ) -> Self {
        let download = match manifest.hub_revision() {
            Some(ModelRevision { repo, commit }) => {
                format!("run `hf download {repo} --revision {commit}` there")
            }
            None => "copy it there".to_owned(),
        };
        Self::Unavailable {
            file: file.path.to_string(),
            bytes: file.bytes,
            digest: file.digest.to_string(),
            tried,
            download,
            may_pass: false,
        }
    }

    /// Returns true if the same call may succeed later without an intervention.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Storage(fault) => fault.is_transient(),
            Self::Unavailable { may_pass, .. } => *may_pass,
            Self::Cache(CacheError::Full { .. } | CacheError::DiskFull { .. }) => true,
            Self::Cache(CacheError::Io { .. })
            | Self::Digest(_)
            | Self::Path(_)
            | Self::Corrupt { .. }
            | Self::TooLarge { .. }
            | Self::Manifest { .. }
            | Self::NoSuchFile { .. } => false,
        }
    }
}

impl CacheError {
    /// Converts an I/O error; a full disk becomes [`CacheError::DiskFull`].
    pub(crate) fn from_io(
        doing: &'static str,
        path: impl Into<PathBuf>,
        source: io::Error,
    ) -> Self {
        let path = path.into();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::DiskFull { path, source }
            }
            _ => Self::Io { doing, path, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(kind: io::ErrorKind) -> StorageError {
        let source = Box::new(io::Error::from(kind));
        StorageError::new(
            "file:///x".into(),
            object_store::Error::Generic { store: "local", source },
        )
    }

    #[test]
    fn a_full_disk_and_a_refusal_are_told_apart_from_other_faults() {
        assert!(matches!(local(io::ErrorKind::StorageFull), StorageError::Full { .. }));
        assert!(matches!(local(io::ErrorKind::PermissionDenied), StorageError::Denied { .. }));
        assert!(matches!(local(io::ErrorKind::TimedOut), StorageError::Failed { .. }));
    }
}
