//! Putting a file into a store that is a directory: a copy of ours, which gets its name when it is
//! whole, right and on the disk.

use std::{
    fs::{self, File},
    io,
    path::{Path as FsPath, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use object_store::path::Path;
use wire::Digest;

use super::{Changed, changed, unread};
use crate::{
    error::{Fault, PutError},
    files,
    parts::Parts,
    store::{Store, blocking},
};

/// Removed unless it got its name.
struct Staged(PathBuf);

impl Drop for Staged {
    fn drop(&mut self) {
        // After a rename there is nothing left to remove.
        let _ = fs::remove_file(&self.0);
    }
}

impl Store {
    pub(super) async fn put_copy(
        &self,
        path: &FsPath,
        target: PathBuf,
        key: &Path,
        (digest, bytes): (Digest, u64),
    ) -> Result<Option<Parts>, PutError> {
        let (from, url) = (path.to_owned(), self.at.url_of(key));
        let copied = blocking(move || {
            let source = File::open(&from).map_err(unread(&from))?;
            let fault = |source| PutError::from(Fault::from_io(url.clone(), source));
            let (to, staged) = stage(&target).map_err(fault)?;
            let (found, count, parts) = files::copy(&source, &to).map_err(fault)?;
            if (found, count) != (digest, bytes) {
                return Err(changed(&from)(Changed));
            }
            commit(&to, &staged, &target).map_err(fault)?;
            Ok(parts)
        });
        copied.await
    }
}

/// Beside its name to be; nobody lists what ends so.
fn stage(target: &FsPath) -> io::Result<(File, Staged)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut name = target.as_os_str().to_owned();
    name.push(format!("#{}{now}{next}", process::id()));
    let staged = PathBuf::from(name);
    let create = || File::options().read(true).write(true).create_new(true).open(&staged);
    let file = match create() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::create_dir_all(target.parent().unwrap_or(target))?;
            create()?
        }
        file => file?,
    };
    Ok((file, Staged(staged)))
}

fn commit(file: &File, staged: &Staged, target: &FsPath) -> io::Result<()> {
    file.sync_all()?;
    fs::rename(&staged.0, target)?;
    File::open(target.parent().unwrap_or(target))?.sync_all()
}
