//! The lock of an agent's directory: its process holds the file `lock`, which names the process.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{Read, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

/// The content of the lock file. The files of early 0.1.0 agents are empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LockHolder {
    pub name: String,
    pub pid: u32,
}

/// Returns the path of the lock file.
fn lock_path(directory: &Path) -> PathBuf {
    directory.join("lock")
}

/// Locks an agent's directory and writes this process into the lock file, because two agents in one
/// directory would overwrite each other's files. The lock lasts until the returned file is dropped.
///
/// # Errors
/// If another agent holds the lock, or the file cannot be written.
pub(crate) fn acquire_lock(directory: &Path, name: &str) -> anyhow::Result<File> {
    let path = lock_path(directory);
    let occupy = || -> anyhow::Result<File> {
        // The content belongs to the other agent until we hold the lock, so the file is not
        // truncated on open.
        let mut file =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "an agent is already running in {}; pass --name or --agent-dir (A105)",
                directory.display()
            ),
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
        file.set_len(0)?;
        let occupant = LockHolder { name: name.to_owned(), pid: std::process::id() };
        file.write_all(&serde_json::to_vec(&occupant)?)?;
        Ok(file)
    };
    occupy().with_context(|| format!("lock {}", path.display()))
}

/// Returns whether an agent holds the lock of a directory, and the content of the lock file if it
/// can be parsed.
///
/// # Errors
/// If the file cannot be read or its lock state cannot be determined.
pub(crate) fn inspect_lock(directory: &Path) -> anyhow::Result<(bool, Option<LockHolder>)> {
    let path = lock_path(directory);
    let look = || -> anyhow::Result<(bool, Option<LockHolder>)> {
        let mut file = File::open(&path)?;
        let works = match file.try_lock_shared() {
            Ok(()) => false,
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Error(error)) => return Err(error.into()),
        };
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        Ok((works, serde_json::from_slice(&text).ok()))
    };
    look().with_context(|| format!("look for a running agent in {}", directory.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_s_directory_says_who_works_there_and_lets_nobody_else_in() {
        let directory = tempfile::tempdir().unwrap();
        assert!(inspect_lock(directory.path()).is_err(), "no agent was ever here");
        let held = acquire_lock(directory.path(), "halo").unwrap();
        let occupant = LockHolder { name: "halo".into(), pid: std::process::id() };
        assert_eq!(inspect_lock(directory.path()).unwrap(), (true, Some(occupant.clone())));
        let refused = format!("{:#}", acquire_lock(directory.path(), "other").unwrap_err());
        assert!(refused.contains("--agent-dir"), "{refused}");
        assert_eq!(inspect_lock(directory.path()).unwrap(), (true, Some(occupant.clone())));
        drop(held);
        assert_eq!(inspect_lock(directory.path()).unwrap(), (false, Some(occupant)));
        // As earlier versions left it.
        std::fs::write(lock_path(directory.path()), "").unwrap();
        assert_eq!(inspect_lock(directory.path()).unwrap(), (false, None));
    }
}
