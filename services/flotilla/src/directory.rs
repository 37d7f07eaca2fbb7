//! A directory to work in: the user's, or one that goes away with what is in it.

use std::path::{Path, PathBuf};

use anyhow::Context;

#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    temporary: bool,
}

impl Directory {
    /// `what` it is for.
    pub(crate) fn choose(named: Option<&Path>, what: &str) -> anyhow::Result<Self> {
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

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn keep(mut self) -> PathBuf {
        self.temporary = false;
        self.path.clone()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if self.temporary {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
