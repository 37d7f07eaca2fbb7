//! What can go wrong, one enum per operation; `Fault` is what the storage itself said.

use std::{error::Error as StdError, io, path::PathBuf};

use hub::Revision;

use crate::{
    door::Refusal,
    manifest::{Manifest, ManifestError, TreeFile},
    path::PathError,
};

type Source = Box<dyn StdError + Send + Sync>;

/// A request the storage did not fulfil, whatever kind of storage it is.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    #[error(
        "{url} refuses access: check who may read and write there (AWS_ACCESS_KEY_ID and its \
         policy, or the directory's owner and mode) (S102)"
    )]
    Denied { url: String, source: Source },
    /// The source is the gateway's sentence.
    #[error("the fleet's gateway refuses {url} (S102)")]
    Refused { url: String, source: Source },
    #[error("{url} has no space left: free some, or raise the quota (S103)")]
    Full { url: String, source: Source },
    #[error("{url} is not there (S104)")]
    Missing { url: String, source: Source },
    #[error("cannot reach {url}, or it failed (S105)")]
    Failed { url: String, source: Source },
}

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
    Settings { url: String, source: Source },
}

#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    #[error(transparent)]
    Fault(#[from] Fault),
    #[error("{url} gave back other bytes than were written: do not use this store (S106)")]
    Differs { url: String },
    #[error(
        "{url} did not answer within {seconds} s: check the address (AWS_ENDPOINT, or the gateway's) (S105)"
    )]
    Silent { url: String, seconds: u64 },
}

#[derive(Debug, thiserror::Error)]
pub enum PutError {
    #[error(transparent)]
    Fault(#[from] Fault),
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

#[derive(Debug, thiserror::Error)]
pub enum GetError {
    #[error(transparent)]
    Fault(#[from] Fault),
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
        /// As many bytes as expected, but others: the way here may be at fault.
        same_size: bool,
    },
    #[error("{url} has {bytes} bytes, more than the {limit} allowed here (S107)")]
    TooLarge { url: String, bytes: u64, limit: u64 },
    #[error("cannot use the manifest {url}")]
    Manifest { url: String, source: ManifestError },
    #[error("the tree {url} has no file {path:?} (S104)")]
    NoSuchFile { url: String, path: String },
    #[error(
        "the base's {file} ({bytes} bytes, {digest}) is nowhere to be had: {tried}; put the \
         model's directory below one that the agent's --models names, or {download}, or submit \
         it again with base.upload: always (S104)"
    )]
    Nowhere {
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

#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    #[error(transparent)]
    Fault(#[from] Fault),
    #[error("cannot remove what a fact names")]
    Digest(#[from] wire::DigestError),
    #[error("the tree {path:?} is not at {expected:?}, where alone it may be removed (S109)")]
    Elsewhere { path: String, expected: String },
}

impl Fault {
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }

    /// Whether the same request may succeed later without anybody doing something here.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Failed { .. } | Self::Full { .. })
    }

    pub(crate) fn new(url: String, source: object_store::Error) -> Self {
        use object_store::Error as E;
        match source {
            E::NotFound { source, .. } => Self::Missing { url, source },
            E::PermissionDenied { source, .. } if source.is::<Refusal>() => {
                Self::Refused { url, source }
            }
            E::PermissionDenied { source, .. } | E::Unauthenticated { source, .. } => {
                Self::Denied { url, source }
            }
            // Its text is its source's text again.
            E::Generic { source, .. } => Self::of_kind(url, io_kind(&*source), source),
            other => Self::of_kind(url, io_kind(&other), Box::new(other)),
        }
    }

    pub(crate) fn from_io(url: String, source: io::Error) -> Self {
        Self::of_kind(url, Some(source.kind()), Box::new(source))
    }

    fn of_kind(url: String, kind: Option<io::ErrorKind>, source: Source) -> Self {
        use io::ErrorKind as K;
        let text = source.to_string();
        match kind {
            Some(K::NotFound) => Self::Missing { url, source },
            Some(K::StorageFull | K::QuotaExceeded) => Self::Full { url, source },
            Some(K::PermissionDenied | K::ReadOnlyFilesystem) => Self::Denied { url, source },
            _ if SAYS_FULL.iter().any(|word| text.contains(word)) => Self::Full { url, source },
            _ => Self::Failed { url, source },
        }
    }
}

/// Error codes of S3 servers (Ceph, MinIO, Garage, R2) for a full disk or quota.
const SAYS_FULL: [&str; 3] = ["StorageFull", "InsufficientStorage", "QuotaExceeded"];

/// The operating system's word, somewhere down the chain.
fn io_kind(error: &(dyn StdError + 'static)) -> Option<io::ErrorKind> {
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
    /// A base's file that cannot be had, and the remedies.
    pub(crate) fn nowhere(manifest: &Manifest, file: &TreeFile, tried: String) -> Self {
        let download = match manifest.revision() {
            Some(Revision { repo, commit }) => {
                format!("run `hf download {repo} --revision {commit}` there")
            }
            None => "copy it there".to_owned(),
        };
        Self::Nowhere {
            file: file.path.to_string(),
            bytes: file.bytes,
            digest: file.digest.to_string(),
            tried,
            download,
            may_pass: false,
        }
    }

    /// Whether the same call may succeed later without anybody doing something.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Fault(fault) => fault.may_pass(),
            Self::Nowhere { may_pass, .. } => *may_pass,
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
    pub(crate) fn io(doing: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
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

    fn local(kind: io::ErrorKind) -> Fault {
        let source = Box::new(io::Error::from(kind));
        Fault::new("file:///x".into(), object_store::Error::Generic { store: "local", source })
    }

    #[test]
    fn a_full_disk_and_a_refusal_are_told_apart_from_other_faults() {
        assert!(matches!(local(io::ErrorKind::StorageFull), Fault::Full { .. }));
        assert!(matches!(local(io::ErrorKind::PermissionDenied), Fault::Denied { .. }));
        assert!(matches!(local(io::ErrorKind::TimedOut), Fault::Failed { .. }));
    }
}
