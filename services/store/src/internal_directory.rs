//! The internal directory of a store that is a directory: unfinished uploads and the store's
//! identity.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
    sync::{Mutex, PoisonError},
};

use wire::Digest;

const INTERNAL_DIR: &str = ".door";

pub(crate) fn uploads_directory(root: &Path) -> PathBuf {
    root.join(INTERNAL_DIR).join("uploads")
}

pub(crate) fn create_private_dir(directory: &Path) -> io::Result<()> {
    durable_files::create_directory(directory, 0o700)
}

pub(crate) fn identity_file(root: &Path) -> PathBuf {
    root.join(INTERNAL_DIR).join("identity")
}

/// Reads the identity of a directory, and creates it if missing. Blocking.
pub(crate) fn read_or_create_identity(root: &Path) -> io::Result<String> {
    // The draft's name is that of the process.
    static DRAFT: Mutex<()> = Mutex::new(());
    let _draft = DRAFT.lock().unwrap_or_else(PoisonError::into_inner);
    let path = identity_file(root);
    create_private_dir(&root.join(INTERNAL_DIR))?;
    for _ in 0..2 {
        match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            read => return read,
        }
        let now = wire::clock::unix_time().as_nanos();
        let seed = format!("{} {now} {}", root.display(), process::id());
        let draft = path.with_extension(process::id().to_string());
        // An empty identity after a power loss would equal that of another store.
        let identity = &Digest::hash_bytes(seed.as_bytes()).to_hex()[..32];
        durable_files::replace_file(&draft, identity.as_bytes(), 0o666)?;
        // Of several processes, the first that links sets the identity.
        let linked = fs::hard_link(&draft, &path);
        fs::remove_file(&draft)?;
        match linked {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    fs::read_to_string(&path)
}
