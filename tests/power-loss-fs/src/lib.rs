//! A FUSE file system for tests that loses what was not fsynced when its power is cut.
//!
//! Each file and directory has a live state, which programs see, and a durable state, which
//! survives. An fsync, or a write with `O_SYNC` or `O_DSYNC`, copies a file's live content to the
//! durable one. [`EntryDurability`] says when names become durable. Permissions and times are
//! durable at once. Everything is in the memory of the process that mounted it.

mod content;
mod entry_log;
mod file_tree;
mod filesystem;

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use fuser::{BackgroundSession, Config, MountOption, SessionACL};
use rustix::mount::{UnmountFlags, unmount};

use crate::filesystem::{DiskState, PowerLossFs};

/// When created, renamed and removed names become durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryDurability {
    /// With an fsync of their directory, which is all that POSIX promises.
    OwnDirectory,
    /// With the next fsync of any file or directory, as on ext4 and XFS, which write all changes of
    /// names to one journal, in order.
    AnySync,
}

/// What of the unsynced changes survives when the power is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnsyncedChanges {
    /// Nothing.
    Lost,
    /// What this seed draws: of each file the first few writes, the last of them torn at a page of
    /// 4096 bytes; of the changes of names a random part ([`EntryDurability::OwnDirectory`]) or
    /// the first few ([`EntryDurability::AnySync`]).
    PartlyKept { seed: u64 },
}

/// A mounted file system. It is unmounted when it is dropped.
pub struct PowerLossDisk {
    path: PathBuf,
    state: Arc<DiskState>,
    _session: BackgroundSession,
}

impl PowerLossDisk {
    /// Mounts an empty file system on an existing directory.
    pub fn mount(path: &Path, durability: EntryDurability) -> io::Result<Self> {
        let path = path.canonicalize()?;
        let state = Arc::new(DiskState::new(durability));
        let mut config = Config::default();
        config.acl = SessionACL::All;
        config.mount_options =
            vec![MountOption::FSName("power-loss".to_owned()), MountOption::DefaultPermissions];
        let session = fuser::spawn_mount(PowerLossFs::new(Arc::clone(&state)), &path, &config)?;
        Ok(Self { path, state, _session: session })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Cuts the power: forgets unsynced changes, and fails every operation with `EIO` until
    /// [`PowerLossDisk::restore_power`]. Returns the number of lost writes, and of
    /// lost changes of names.
    pub fn cut_power(&self, unsynced: UnsyncedChanges) -> LostChanges {
        self.state.cut_power(unsynced)
    }

    /// Serves operations again. Processes that had files open before must have ended: their files
    /// stay unusable.
    pub fn restore_power(&self) {
        self.state.restore_power();
    }
}

impl Drop for PowerLossDisk {
    fn drop(&mut self) {
        // Processes of a failed test may still use it.
        let _ = unmount(&self.path, UnmountFlags::DETACH);
    }
}

/// The extent of what a power cut destroyed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LostChanges {
    /// Writes and changes of length.
    pub writes: usize,
    /// Created, renamed and removed names.
    pub entries: usize,
}
