//! Errors of this crate, one enum per operation. [`StorageError`] is a failed request to the
//! storage itself.

use std::{error::Error as StdError, io, path::PathBuf};

use hub::ModelRevision;

use crate::{
    manifest::{ManifestError, TreeFile, TreeManifest},
    path::PathError,
    removal::TreeRemoval,
};

type ErrorSource = Box<dyn StdError + Send + Sync>;

/// A request that the storage did not fulfil, for any kind of storage.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    #[error(
        "{url} refuses access: check who may read and write there (AWS_ACCESS_KEY_ID and its \
         policy, or the directory's owner and mode) (S102)"
    )]
    Denied { url: String, source: ErrorSource },
    /// The gateway refused the request; the source is its message.
    #[error("the fleet's gateway refuses {url} (S102)")]
    Refused { url: String, source: ErrorSource },
    #[error("{url} has no space left: free some, or raise the quota (S103)")]
    Full { url: String, source: ErrorSource },
    #[error("{url} is not there (S104)")]
    Missing { url: String, source: ErrorSource },
    /// The storage is unreachable, or failed for another reason.
    #[error("cannot reach {url}, or it failed (S105)")]
    Failed { url: String, source: ErrorSource },
}

/// The reason why a store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot use {url:?} as a store: {reason} (S101)")]
    Url { url: String, reason: String },
    #[error("cannot create the store's directory {} (S101)", path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error(
        "no credentials for {url}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles in \
         ~/.aws are not read), AWS_WEB_IDENTITY_TOKEN_FILE, AWS_METADATA_ENDPOINT for an \
         instance's own, or AWS_SKIP_SIGNATURE=true for a public bucket (S101)"
    )]
    Credentials { url: String },
    #[error("cannot set up {url} from the AWS_* environment (S101)")]
    Settings { url: String, source: ErrorSource },
}

/// The reason why the check of a store failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("{url} gave back other bytes than were written: do not use this store (S106)")]
    Differs { url: String },
    #[error(
        "{url} did not answer within {seconds} s: check the address (AWS_ENDPOINT, or the gateway's) (S105)"
    )]
    Silent { url: String, seconds: u64 },
}

/// The reason why a blob or tree was not published.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error("cannot read {} to publish it", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot publish {}: it is neither a regular file nor a directory (S108)", path.display())]
    Kind { path: PathBuf },
    #[error("cannot publish {}: it holds no files (S108)", path.display())]
    Empty { path: PathBuf },
    #[error("cannot publish {}", path.display())]
    Path { path: PathBuf, source: PathError },
    #[error("cannot describe {} in a manifest", path.display())]
    Manifest { path: PathBuf, source: ManifestError },
    #[error("{} changed while it was published: publish it again when it is complete (S108)", path.display())]
    Changed { path: PathBuf },
    #[error(
        "{url} holds another manifest than its name says: remove that directory and publish again (S106)"
    )]
    Occupied { url: String },
}

/// The reason why a blob, a tree or a file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum GetError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error("cannot fetch what a fact names")]
    Digest(#[from] wire::DigestError),
    #[error("cannot fetch what a fact names")]
    Path(#[from] PathError),
    #[error(
        "{url} is damaged: expected {expected}, found {found}; restore or remove that object, \
         then publish it again (S106)"
    )]
    Corrupt {
        url: String,
        expected: String,
        found: String,
        /// True if the number of bytes is right: the network may be at fault.
        same_size: bool,
    },
    #[error("{url} has {bytes} bytes, more than the {limit} allowed here (S107)")]
    TooLarge { url: String, bytes: u64, limit: u64 },
    #[error(
        "{url} was removed on {} by {}, as none of the rules {} kept it; `flotilla checkpoint list \
         RUN` shows what is left (S113)", removal.at, removal.by, removal.rules
    )]
    Removed { url: String, removal: TreeRemoval },
    #[error("cannot use the manifest {url}")]
    Manifest { url: String, source: ManifestError },
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
        /// What was tried, with the results.
        tried: String,
        /// The remedies.
        download: String,
        may_pass: bool,
    },
}

/// A failure of the local cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    #[error("cannot {doing} {} in the cache: check its owner, mode and file system (S110)", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("the disk of the cache {} is full: free some space (S110)", path.display())]
    DiskFull { path: PathBuf, source: io::Error },
    #[error(
        "{needed} bytes do not fit into the cache {}: its limit is {limit} and {in_use} are in \
         use; raise the limit or wait for jobs to end (S110)", path.display()
    )]
    Full { path: PathBuf, needed: u64, limit: u64, in_use: u64 },
}

/// The reason why a tree was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("cannot remove what a fact names")]
    Digest(#[from] wire::DigestError),
    #[error("the tree {path:?} is not at {expected:?}, where alone it may be removed (S109)")]
    WrongPlace { path: String, expected: String },
}

/// The message of a gateway that refused a request, for the user.
#[derive(Debug, thiserror::Error)]
#[error("{sentence}")]
pub struct GatewayRefusal {
    pub sentence: String,
}

impl StorageError {
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }

    /// Returns true if the same request may succeed later without an intervention here.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Failed { .. } | Self::Full { .. })
    }

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

    pub(crate) fn from_io(url: String, source: io::Error) -> Self {
        Self::from_kind(url, Some(source.kind()), Box::new(source))
    }

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

/// Codes of S3 servers (Ceph, MinIO, Garage, R2) for a full disk or quota.
const FULL_ERROR_CODES: [&str; 3] = ["StorageFull", "InsufficientStorage", "QuotaExceeded"];

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
            | Self::Removed { .. }
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
    fn a_full_disk_and_a_refusal_differ_from_other_faults() {
        assert!(matches!(local(io::ErrorKind::StorageFull), StorageError::Full { .. }));
        assert!(matches!(local(io::ErrorKind::PermissionDenied), StorageError::Denied { .. }));
        assert!(matches!(local(io::ErrorKind::TimedOut), StorageError::Failed { .. }));
    }
}
