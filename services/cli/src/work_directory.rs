//! A working directory: the user's, or a temporary one that is deleted.

use std::path::{Path, PathBuf};

use anyhow::Context;

/// A working directory, deleted with its content on drop if it is temporary.
#[derive(Debug)]
pub struct WorkDirectory {
    path: PathBuf,
    temporary: bool,
}

impl WorkDirectory {
    /// Opens the directory `named`, or creates a temporary one for the purpose `what`.
    pub fn open_or_create(named: Option<&Path>, what: &str) -> anyhow::Result<Self> {
        let (path, temporary) = match named {
            Some(path) => (path.to_owned(), false),
            None => {
                let name = format!("flotilla-{what}-{}", std::process::id());
                (std::env::temp_dir().join(name), true)
            }
        };
        std::fs::create_dir_all(&path)
            .and_then(|()| path.canonicalize())
            .map(|path| Self { path, temporary })
            .with_context(|| format!("use {} for the {what}", path.display()))
    }

    pub fn as_path(&self) -> &Path {
        &self.path
    }

    /// Keeps the directory, even if it is temporary, and returns its path.
    pub fn keep_files(mut self) -> PathBuf {
        self.temporary = false;
        self.path.clone()
    }
}

impl Drop for WorkDirectory {
    fn drop(&mut self) {
        if self.temporary {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
