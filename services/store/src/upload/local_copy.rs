//! Writes of a file into a store that is a directory: a copy beside the target, renamed when it is
//! complete, verified and on disk.

use std::{
    fs::File,
    path::{Path as FsPath, PathBuf},
};

use object_store::path::Path;
use wire::Digest;

use super::{FileChanged, changed_error, read_error};
use crate::{
    blocking::run_blocking,
    error::{PutError, StorageError},
    file_hashing,
    parts::PartHashes,
    staged_file::{commit_staged, create_staged},
    store::Store,
};

impl Store {
    pub(super) async fn put_local_copy(
        &self,
        path: &FsPath,
        target: PathBuf,
        key: &Path,
        (digest, bytes): (Digest, u64),
    ) -> Result<Option<PartHashes>, PutError> {
        let (from, url) = (path.to_owned(), self.backend.object_url(key));
        let copied = run_blocking(move || {
            let source = File::open(&from).map_err(read_error(&from))?;
            let fault = |source| PutError::from(StorageError::from_io(url.clone(), source));
            let (to, staged) = create_staged(&target).map_err(fault)?;
            let (found, count, parts) = file_hashing::copy_and_hash(&source, &to).map_err(fault)?;
            if (found, count) != (digest, bytes) {
                return Err(changed_error(&from)(FileChanged));
            }
            commit_staged(&to, &staged, &target).map_err(fault)?;
            Ok(parts)
        });
        copied.await
    }
}
