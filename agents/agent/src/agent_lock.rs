//! The lock of an agent's directory: its process holds the file `lock`, which names the process.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{Read, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

/// The content of the lock file. The files of early 0.1.0 agents are empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockHolder {
    pub name: String,
    pub pid: u32,
}

impl LockHolder {
    /// Returns the process id; `None` if no process can have it (0, or above `i32::MAX`). The
    /// process may have ended.
    pub fn process(&self) -> Option<Pid> {
        i32::try_from(self.pid).ok().and_then(Pid::from_raw)
    }
}

fn lock_path(directory: &Path) -> PathBuf {
    directory.join("lock")
}

/// Locks an agent's directory until the returned file is dropped, because two agents in one
/// directory would overwrite each other's files. Writes the agent's `name` and this process's id to
/// the lock file. Fails if another process holds the lock (A105) or the file cannot be written.
pub fn acquire_lock(directory: &Path, name: &str) -> anyhow::Result<File> {
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
        let holder = LockHolder { name: name.to_owned(), pid: std::process::id() };
        file.write_all(&serde_json::to_vec(&holder)?)?;
        Ok(file)
    };
    occupy().with_context(|| format!("lock {}", path.display()))
}

/// Returns whether an agent holds the lock of a directory, and the content of the lock file: its
/// holder or, if it is free, its last one; `None` if it cannot be parsed. Takes no lasting lock.
/// Fails if the lock file does not exist or cannot be read.
pub fn inspect_lock(directory: &Path) -> anyhow::Result<(bool, Option<LockHolder>)> {
    let path = lock_path(directory);
    let inspect = || -> anyhow::Result<(bool, Option<LockHolder>)> {
        let mut file = File::open(&path)?;
        let is_held = match file.try_lock_shared() {
            Ok(()) => false,
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Error(error)) => return Err(error.into()),
        };
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        Ok((is_held, serde_json::from_slice(&text).ok()))
    };
    inspect().with_context(|| format!("look for a running agent in {}", directory.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_locked_directory_names_its_agent_and_refuses_another() {
        let directory = tempfile::tempdir().unwrap();
        assert!(inspect_lock(directory.path()).is_err(), "no agent was ever here");
        let held = acquire_lock(directory.path(), "halo").unwrap();
        let holder = LockHolder { name: "halo".into(), pid: std::process::id() };
        assert_eq!(inspect_lock(directory.path()).unwrap(), (true, Some(holder.clone())));
        let refused = format!("{:#}", acquire_lock(directory.path(), "other").unwrap_err());
        assert!(refused.contains("--agent-dir"), "{refused}");
        assert_eq!(inspect_lock(directory.path()).unwrap(), (true, Some(holder.clone())));
        drop(held);
        assert_eq!(inspect_lock(directory.path()).unwrap(), (false, Some(holder)));
        // The lock file of an earlier version.
        std::fs::write(lock_path(directory.path()), "").unwrap();
        assert_eq!(inspect_lock(directory.path()).unwrap(), (false, None));
    }
}
