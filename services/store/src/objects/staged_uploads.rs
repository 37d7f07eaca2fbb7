//! Staging area for uploads to a directory: one file per upload in `.door/uploads` until the upload
//! is complete. The file name is derived from owner and key, so that no member reaches the upload
//! of another. There is no other state on the disk, so a restarted server continues the uploads.
//!
//! A part's file stays open while its body arrives, and would still lead to the bytes after the
//! upload became an object. So each write holds the upload's lock and checks that the upload is
//! still there, and completing it excludes all writes ([`upload_lock`]).

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process,
    sync::{
        Arc, Mutex, PoisonError, RwLock, TryLockError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use futures::{Stream, TryStreamExt};
use wire::Digest;

use super::key_digest::digest_prefix;
use crate::{
    blocking::run_blocking,
    error::StorageError,
    file_hashing,
    internal_directory::{create_private_dir, uploads_directory},
    leftovers::{LEFTOVER_AGE, activity_time},
    limits::OBJECT_BYTES_MAX,
    path::RelativePath,
};

/// The largest number of uploads in progress; each trainer of the fleet sends one file at a time.
pub(super) const UPLOADS_MAX: usize = 1024;
pub(super) const MEMBER_UPLOADS_MAX: usize = 32;
const MEMBER_BYTES_MAX: u64 = 2 * OBJECT_BYTES_MAX;
/// The suffix of an object's file that arrives in one piece; it cannot be resumed and does not
/// count as an upload.
const PIECE_SUFFIX: &str = ".piece";
/// The number of bytes written together, because each write is a switch to another thread.
const WRITE_BYTES: usize = 1 << 20;

/// The reason why an object or a part was not received.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("it has {bytes} bytes, the limit is {limit} (S107)")]
    TooLarge { bytes: u64, limit: u64 },
    #[error("{expected} bytes were announced and {got} came (S112)")]
    Size { expected: u64, got: u64 },
    #[error(
        "its bytes do not match its name: their digest is {found}, the name has {named} (S112)"
    )]
    Differs { named: String, found: String },
    #[error("there is no such upload (any more): begin it again (S112)")]
    NoUpload,
    #[error("the upload is being completed and takes no more parts (S112)")]
    Completing,
    #[error("{UPLOADS_MAX} uploads are in progress; try again later (G104)")]
    Busy,
    #[error(
        "you have {MEMBER_UPLOADS_MAX} unfinished uploads, the limit for a member: continue them, \
         abort them (DELETE …?upload=ID), or wait; each is removed a day after its last byte \
         (G104)"
    )]
    TooManyUploads,
    #[error(
        "your unfinished uploads have {bytes} bytes, the limit is {limit}: continue them, abort \
         them (DELETE …?upload=ID), or wait; each is removed a day after its last byte (G104)"
    )]
    TooManyBytes { bytes: u64, limit: u64 },
    #[error("it stopped coming (S112)")]
    Broken(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("cannot write to the store's directory")]
    Io(#[from] io::Error),
}

impl ReceiveError {
    pub(super) fn with_url(self, url: &str) -> Self {
        match self {
            Self::Io(source) => Self::Storage(StorageError::from_io(url.to_owned(), source)),
            other => other,
        }
    }
}

pub(super) struct UploadStaging {
    root: PathBuf,
    url: String,
}

/// The path of a staged file, which is removed on drop unless it was renamed or kept.
#[derive(Debug)]
pub(super) struct StagedPiece(PathBuf);

impl StagedPiece {
    pub(super) fn file_path(&self) -> &Path {
        &self.0
    }

    fn keep_file(mut self) {
        self.0 = PathBuf::new();
    }
}

impl Drop for StagedPiece {
    fn drop(&mut self) {
        if !self.0.as_os_str().is_empty() {
            let _ = fs::remove_file(&self.0);
        }
    }
}

impl UploadStaging {
    pub(super) fn new(root: PathBuf, url: String) -> Self {
        Self { root, url }
    }

    pub(super) async fn begin_upload(
        &self,
        owner: &str,
        key: &RelativePath,
    ) -> Result<String, ReceiveError> {
        let upload = new_upload_name(owner);
        let path = self.upload_path(owner, key, &upload)?;
        self.create_staged_file(owner, path, 0).await?.keep_file();
        Ok(upload)
    }

    pub(super) async fn begin_piece(
        &self,
        owner: &str,
        key: &RelativePath,
        bytes: u64,
    ) -> Result<StagedPiece, ReceiveError> {
        let path = self.upload_path(owner, key, &new_upload_name(owner))?;
        let mut name = path.into_os_string();
        name.push(PIECE_SUFFIX);
        self.create_staged_file(owner, PathBuf::from(name), bytes).await
    }

    /// Creates the file after removing abandoned ones and checking the limits of the member and the
    /// store. If this future is dropped, the file is removed.
    async fn create_staged_file(
        &self,
        owner: &str,
        path: PathBuf,
        bytes: u64,
    ) -> Result<StagedPiece, ReceiveError> {
        let (owner, directory) = (owner_prefix(owner), self.upload_directory());
        let created = run_blocking(move || {
            let is_piece = path.to_string_lossy().ends_with(PIECE_SUFFIX);
            let used = StagingUsage::clean_and_measure(&directory, &owner)?;
            used.check_bytes(bytes, MEMBER_BYTES_MAX)?;
            if !is_piece {
                used.check_count()?;
            }
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            Ok(StagedPiece(path))
        });
        created.await.map_err(|error: ReceiveError| error.with_url(&self.url))
    }

    /// Checks the limit in bytes after removing abandoned files.
    pub(super) async fn check_member_bytes(
        &self,
        owner: &str,
        bytes: u64,
    ) -> Result<(), ReceiveError> {
        let (owner, directory) = (owner_prefix(owner), self.upload_directory());
        let checked = run_blocking(move || {
            StagingUsage::clean_and_measure(&directory, &owner)?
                .check_bytes(bytes, MEMBER_BYTES_MAX)
        });
        checked.await.map_err(|error| error.with_url(&self.url))
    }

    pub(super) fn upload_path(
        &self,
        owner: &str,
        key: &RelativePath,
        upload: &str,
    ) -> Result<PathBuf, ReceiveError> {
        let is_ours = upload.len() == 32 && upload.bytes().all(|b| b.is_ascii_hexdigit());
        if !is_ours {
            return Err(ReceiveError::NoUpload);
        }
        let whose = Digest::hash_bytes(format!("{owner}\n{key}").as_bytes()).to_hex();
        let name = format!("{}-{}-{upload}", owner_prefix(owner), &whose[..32]);
        Ok(self.upload_directory().join(name))
    }

    fn upload_directory(&self) -> PathBuf {
        uploads_directory(&self.root)
    }
}

fn new_upload_name(owner: &str) -> String {
    static BEGUN: AtomicU64 = AtomicU64::new(0);
    let now = wire::clock::unix_time().as_nanos();
    let count = BEGUN.fetch_add(1, Ordering::Relaxed);
    let seed = format!("{owner} {now} {count} {}", process::id());
    Digest::hash_bytes(seed.as_bytes()).to_hex()[..32].to_owned()
}

/// Returns 16 hex digits of the digest of the member's name.
pub(super) fn owner_prefix(owner: &str) -> String {
    Digest::hash_bytes(owner.as_bytes()).to_hex()[..16].to_owned()
}

#[derive(Debug, Default)]
struct StagingUsage {
    /// The uploads of all members, without pieces.
    uploads: usize,
    member_uploads: usize,
    member_bytes: u64,
}

impl StagingUsage {
    /// Removes abandoned files and measures the rest. `owner` is the prefix of the member's
    /// uploads.
    fn clean_and_measure(directory: &Path, owner: &str) -> io::Result<Self> {
        create_private_dir(directory)?;
        let mut used = Self::default();
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            // Another upload was completed meanwhile.
            let Ok(meta) = entry.metadata() else { continue };
            if activity_time(&meta).elapsed().unwrap_or_default() > LEFTOVER_AGE {
                let _ = fs::remove_file(entry.path());
                continue;
            }
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let is_members = name.strip_prefix(owner).is_some_and(|rest| rest.starts_with('-'));
            if is_members {
                // Only allocated blocks count: a part may be written far behind the others and
                // leave a hole.
                used.member_bytes += meta.blocks() * 512;
            }
            if !name.ends_with(PIECE_SUFFIX) {
                used.uploads += 1;
                used.member_uploads += usize::from(is_members);
            }
        }
        Ok(used)
    }

    fn check_count(&self) -> Result<(), ReceiveError> {
        match self {
            used if used.member_uploads >= MEMBER_UPLOADS_MAX => Err(ReceiveError::TooManyUploads),
            used if used.uploads >= UPLOADS_MAX => Err(ReceiveError::Busy),
            _ => Ok(()),
        }
    }

    fn check_bytes(&self, more: u64, limit: u64) -> Result<(), ReceiveError> {
        let bytes = self.member_bytes.saturating_add(more);
        if bytes > limit { Err(ReceiveError::TooManyBytes { bytes, limit }) } else { Ok(()) }
    }
}

/// Returns the lock of an upload: a write shares it, completing the upload holds it alone. One
/// process serves a directory, so the lock is in memory.
fn upload_lock(path: &Path) -> Arc<RwLock<()>> {
    static LOCKS: Mutex<BTreeMap<PathBuf, Weak<RwLock<()>>>> = Mutex::new(BTreeMap::new());
    let mut locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(lock) = locks.get(path).and_then(Weak::upgrade) {
        return lock;
    }
    locks.retain(|_, lock| lock.strong_count() > 0);
    let lock = Arc::default();
    locks.insert(path.to_owned(), Arc::downgrade(&lock));
    lock
}

/// Writes a body of exactly `bytes` bytes at an offset of an existing upload. Fails when the upload
/// is completed or ended before the last byte.
pub(super) async fn write_at_offset(
    path: &Path,
    offset: u64,
    bytes: u64,
    body: impl Stream<Item = Result<Bytes, ReceiveError>>,
) -> Result<(), ReceiveError> {
    let path = path.to_owned();
    let mut upload = run_blocking(move || OpenUpload::open(path)).await?;
    let mut body = std::pin::pin!(body);
    let (mut got, mut held, mut pieces) = (0, 0, Vec::new());
    loop {
        let piece = body.try_next().await?;
        let last = piece.is_none();
        if let Some(piece) = piece {
            held += piece.len();
            pieces.push(piece);
        }
        if got + held as u64 > bytes {
            return Err(ReceiveError::Size { expected: bytes, got: got + held as u64 });
        }
        if held >= WRITE_BYTES || last {
            let (at, taken) = (offset + got, std::mem::take(&mut pieces));
            upload = run_blocking(move || upload.write_pieces(at, &taken)).await?;
            got += std::mem::take(&mut held) as u64;
        }
        if last {
            break;
        }
    }
    if got == bytes { Ok(()) } else { Err(ReceiveError::Size { expected: bytes, got }) }
}

struct OpenUpload {
    file: File,
    path: PathBuf,
    lock: Arc<RwLock<()>>,
}

impl OpenUpload {
    fn open(path: PathBuf) -> Result<Self, ReceiveError> {
        let file = OpenOptions::new().write(true).open(&path).map_err(missing_is_no_upload)?;
        let lock = upload_lock(&path);
        Ok(Self { file, path, lock })
    }

    /// Writes pieces from an offset, unless the upload is being completed or has ended. Blocking.
    fn write_pieces(self, mut at: u64, pieces: &[Bytes]) -> Result<Self, ReceiveError> {
        let shared = match self.lock.try_read() {
            Err(TryLockError::WouldBlock) => return Err(ReceiveError::Completing),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Ok(shared) => shared,
        };
        // The file may be an object by now, under another name.
        fs::symlink_metadata(&self.path).map_err(missing_is_no_upload)?;
        for piece in pieces {
            self.file.write_all_at(piece, at)?;
            at += piece.len() as u64;
        }
        drop(shared);
        Ok(self)
    }
}

fn missing_is_no_upload(error: io::Error) -> ReceiveError {
    match error.kind() {
        io::ErrorKind::NotFound => ReceiveError::NoUpload,
        _ => ReceiveError::Io(error),
    }
}

/// Renames an upload to its final name, if its size and the digest in its key match. Waits for a
/// write in progress; later writes fail.
pub(super) async fn commit_upload(
    staged: PathBuf,
    target: PathBuf,
    bytes: u64,
    named: Option<String>,
) -> Result<(), ReceiveError> {
    run_blocking(move || {
        let lock = upload_lock(&staged);
        let _alone = lock.write().unwrap_or_else(PoisonError::into_inner);
        let file = File::open(&staged).map_err(missing_is_no_upload)?;
        let got = file.metadata()?.len();
        if got != bytes {
            return Err(ReceiveError::Size { expected: bytes, got });
        }
        if let Some(named) = named {
            let found = file_hashing::hash_open_file(&file, &|_| ())?.0.to_hex();
            if !found.starts_with(&named) {
                // Removed here, because the sender may be gone and never abort the upload.
                let _ = fs::remove_file(&staged);
                return Err(ReceiveError::Differs { named, found });
            }
        }
        file.sync_all()?;
        durable_files::create_directory(target.parent().unwrap_or(&target), 0o777)?;
        fs::set_permissions(&staged, std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
        fs::rename(&staged, &target)?;
        durable_files::sync_parent(&target)?;
        Ok(())
    })
    .await
}

pub(super) async fn discard_upload(path: PathBuf) {
    let _ = run_blocking(move || fs::remove_file(path)).await;
}

pub(super) fn check_key_digest(key: &RelativePath, bytes: &[u8]) -> Result<(), ReceiveError> {
    let Some(named) = digest_prefix(key) else { return Ok(()) };
    let found = Digest::hash_bytes(bytes).to_hex();
    if found.starts_with(&named) { Ok(()) } else { Err(ReceiveError::Differs { named, found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_members_uploads_are_counted_with_what_they_take_and_not_anothers() {
        let dir = tempfile::tempdir().unwrap();
        let (ann, bob) = (owner_prefix("ann"), owner_prefix("bob"));
        for (name, bytes) in
            [(format!("{ann}-k-1"), 8192), (format!("{ann}-k-2{PIECE_SUFFIX}"), 4096)]
        {
            fs::write(dir.path().join(name), vec![7; bytes]).unwrap();
        }
        fs::write(dir.path().join(format!("{bob}-k-3")), [7; 4096]).unwrap();
        // One byte a terabyte away, which leaves a hole.
        let sparse = File::create(dir.path().join(format!("{ann}-k-4"))).unwrap();
        sparse.write_all_at(b"x", 1 << 40).unwrap();
        let used = StagingUsage::clean_and_measure(dir.path(), &ann).unwrap();
        assert_eq!((used.uploads, used.member_uploads), (3, 2));
        assert!((12_288..1 << 20).contains(&used.member_bytes), "{used:?}");
        used.check_bytes(100, 1 << 20).unwrap();
        let refused = used.check_bytes(1 << 20, 1 << 20).unwrap_err().to_string();
        assert!(refused.contains("abort them"), "{refused}");
    }
}
