//! Where uploads to a directory lie until they are whole: files in `.door/uploads`, one each,
//! named for who sends what, so that no one reaches another's. There is no other state: a server
//! that was started anew goes on with them.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use futures::{Stream, TryStreamExt};
use wire::Digest;

use crate::{error::Fault, files, path::RelativePath, store::blocking};

const DOOR: &str = ".door";
/// In progress at once; the fleet's trainers send one file at a time each.
const UPLOADS_MAX: usize = 256;
/// Nobody goes on with an upload that nothing came for so long.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);
/// Written together, for each write is a trip to another thread.
const WRITE_BYTES: usize = 1 << 20;

/// Why something was not received.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    #[error(transparent)]
    Fault(#[from] Fault),
    #[error("it has {bytes} bytes, the limit is {limit} (S107)")]
    TooLarge { bytes: u64, limit: u64 },
    #[error("{expected} bytes were announced and {got} came (S112)")]
    Size { expected: u64, got: u64 },
    #[error(
        "its bytes are not what its name says: their digest is {found}, the name has {named} (S112)"
    )]
    Differs { named: String, found: String },
    #[error("there is no such upload (any more): begin it again (S112)")]
    NoUpload,
    #[error("{UPLOADS_MAX} uploads are in progress; try again later (G104)")]
    Busy,
    #[error("it stopped coming (S112)")]
    Broken(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("cannot write to the store's directory")]
    Io(#[from] io::Error),
}

impl ReceiveError {
    /// What the disk said, as a fault of the store.
    pub(super) fn at(self, url: &str) -> Self {
        match self {
            Self::Io(source) => Self::Fault(Fault::from_io(url.to_owned(), source)),
            other => other,
        }
    }
}

/// The uploads of one directory.
pub(super) struct Stage {
    root: PathBuf,
    url: String,
}

impl Stage {
    pub(super) fn new(root: PathBuf, url: String) -> Self {
        Self { root, url }
    }

    pub(super) async fn begin(
        &self,
        owner: &str,
        key: &RelativePath,
    ) -> Result<String, ReceiveError> {
        static BEGUN: AtomicU64 = AtomicU64::new(0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let count = BEGUN.fetch_add(1, Ordering::Relaxed);
        let seed = format!("{owner} {now} {count} {}", process::id());
        let upload = Digest::of(seed.as_bytes()).to_hex()[..32].to_owned();
        let (path, directory) = (self.at(owner, key, &upload)?, self.directory());
        let begun = blocking(move || {
            make_room(&directory)?;
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
            Ok(())
        });
        begun.await.map_err(|error: ReceiveError| error.at(&self.url))?;
        Ok(upload)
    }

    /// Where an upload lies, or would.
    pub(super) fn at(
        &self,
        owner: &str,
        key: &RelativePath,
        upload: &str,
    ) -> Result<PathBuf, ReceiveError> {
        let is_ours = upload.len() == 32 && upload.bytes().all(|b| b.is_ascii_hexdigit());
        if !is_ours {
            return Err(ReceiveError::NoUpload);
        }
        let whose = Digest::of(format!("{owner}\n{key}").as_bytes()).to_hex();
        Ok(self.directory().join(format!("{}-{upload}", &whose[..32])))
    }

    fn directory(&self) -> PathBuf {
        self.root.join(DOOR).join("uploads")
    }
}

/// Removes what was abandoned; refuses when too many are left.
fn make_room(directory: &Path) -> Result<(), ReceiveError> {
    private(directory)?;
    let mut in_progress = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        // Another's that was completed meanwhile.
        let Ok(meta) = entry.metadata() else { continue };
        let age = meta.modified()?.elapsed().unwrap_or_default();
        if age > ABANDONED {
            let _ = fs::remove_file(entry.path());
        } else {
            in_progress += 1;
        }
    }
    if in_progress >= UPLOADS_MAX { Err(ReceiveError::Busy) } else { Ok(()) }
}

fn private(directory: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// Writes what comes to a place in an upload that was begun.
pub(super) async fn write(
    path: &Path,
    offset: u64,
    bytes: u64,
    body: impl Stream<Item = Result<Bytes, ReceiveError>>,
) -> Result<(), ReceiveError> {
    let opened = path.to_owned();
    let opened = blocking(move || OpenOptions::new().write(true).open(opened)).await;
    let mut file = opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => ReceiveError::NoUpload,
        _ => ReceiveError::Io(error),
    })?;
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
            file = blocking(move || write_all(file, at, &taken)).await?;
            got += std::mem::take(&mut held) as u64;
        }
        if last {
            break;
        }
    }
    if got == bytes { Ok(()) } else { Err(ReceiveError::Size { expected: bytes, got }) }
}

fn write_all(file: File, mut at: u64, pieces: &[Bytes]) -> io::Result<File> {
    for piece in pieces {
        file.write_all_at(piece, at)?;
        at += piece.len() as u64;
    }
    Ok(file)
}

/// The upload gets its name, if it is whole and what its name says.
pub(super) async fn commit(
    staged: PathBuf,
    target: PathBuf,
    bytes: u64,
    named: Option<String>,
) -> Result<(), ReceiveError> {
    blocking(move || {
        let file = match File::open(&staged) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(ReceiveError::NoUpload);
            }
            file => file?,
        };
        let got = file.metadata()?.len();
        if got != bytes {
            return Err(ReceiveError::Size { expected: bytes, got });
        }
        if let Some(named) = named {
            let found = files::hash(&file, &|_| ())?.0.to_hex();
            if !found.starts_with(&named) {
                return Err(ReceiveError::Differs { named, found });
            }
        }
        file.sync_all()?;
        let directory = target.parent().unwrap_or(&target);
        fs::create_dir_all(directory)?;
        fs::set_permissions(&staged, std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
        fs::rename(&staged, &target)?;
        File::open(directory)?.sync_all()?;
        Ok(())
    })
    .await
}

/// What is gone already is fine.
pub(super) async fn discard(path: PathBuf) {
    let _ = blocking(move || fs::remove_file(path)).await;
}

pub(super) fn check_named(key: &RelativePath, bytes: &[u8]) -> Result<(), ReceiveError> {
    let Some(named) = super::named(key) else { return Ok(()) };
    let found = Digest::of(bytes).to_hex();
    if found.starts_with(&named) { Ok(()) } else { Err(ReceiveError::Differs { named, found }) }
}

/// Where a directory keeps its name.
pub(crate) fn identity_file(root: &Path) -> PathBuf {
    root.join(DOOR).join("identity")
}

/// Reads the directory's name, or gives it one.
pub(super) fn identity(root: &Path) -> io::Result<String> {
    let path = identity_file(root);
    private(&root.join(DOOR))?;
    for _ in 0..2 {
        match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            read => return read,
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let seed = format!("{} {now} {}", root.display(), process::id());
        let draft = path.with_extension(process::id().to_string());
        fs::write(&draft, &Digest::of(seed.as_bytes()).to_hex()[..32])?;
        // Whoever links first has named it.
        let linked = fs::hard_link(&draft, &path);
        fs::remove_file(&draft)?;
        match linked {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    fs::read_to_string(&path)
}
