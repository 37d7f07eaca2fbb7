//! Who works in an agent's directory: the file `lock` in it is held by the agent's process, and
//! names it.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{Read, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

/// What an agent writes of itself. Nothing of an agent of 0.1.0 before this was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Occupant {
    pub name: String,
    pub pid: u32,
}

fn path(directory: &Path) -> PathBuf {
    directory.join("lock")
}

/// Moves in: two agents in one directory would take each other's files.
///
/// # Errors
/// When another is there.
pub(crate) fn move_in(directory: &Path, name: &str) -> anyhow::Result<File> {
    let path = path(directory);
    let occupy = || -> anyhow::Result<File> {
        // What is written is the other's, until the lock is ours.
        let mut file =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "an agent works in {} already; pass --name or --agent-dir (A105)",
                directory.display()
            ),
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
        file.set_len(0)?;
        let occupant = Occupant { name: name.to_owned(), pid: std::process::id() };
        file.write_all(&serde_json::to_vec(&occupant)?)?;
        Ok(file)
    };
    occupy().with_context(|| format!("lock {}", path.display()))
}

/// Whether an agent works there, and what it wrote of itself.
///
/// # Errors
/// When that cannot be found out.
pub(crate) fn look(directory: &Path) -> anyhow::Result<(bool, Option<Occupant>)> {
    let path = path(directory);
    let look = || -> anyhow::Result<(bool, Option<Occupant>)> {
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
    look().with_context(|| format!("look for an agent in {}", directory.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_s_directory_says_who_works_there_and_lets_nobody_else_in() {
        let directory = tempfile::tempdir().unwrap();
        assert!(look(directory.path()).is_err(), "no agent was ever here");
        let held = move_in(directory.path(), "halo").unwrap();
        let occupant = Occupant { name: "halo".into(), pid: std::process::id() };
        assert_eq!(look(directory.path()).unwrap(), (true, Some(occupant.clone())));
        let refused = format!("{:#}", move_in(directory.path(), "other").unwrap_err());
        assert!(refused.contains("--agent-dir"), "{refused}");
        assert_eq!(look(directory.path()).unwrap(), (true, Some(occupant.clone())));
        drop(held);
        assert_eq!(look(directory.path()).unwrap(), (false, Some(occupant)));
        // As earlier versions left it.
        std::fs::write(path(directory.path()), "").unwrap();
        assert_eq!(look(directory.path()).unwrap(), (false, None));
    }
}
