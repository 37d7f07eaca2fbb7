//! Rooms: a new in-memory file system for each; the only place that programs can write to.

use std::{
    ffi::CString,
    fs::{self, DirBuilder, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Component, Path},
};

use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};

use super::WORK;

const ROOM_PATH: &str = "/room";

/// Each file or directory takes about 1 KiB of kernel memory.
const FILES_MAX: u32 = 32 * 1024;

#[derive(Debug, Default)]
pub(crate) struct RoomMount {
    disk_bytes: Option<u64>,
}

impl RoomMount {
    /// Unmounts the previous room. `contents` has the files' contents in order.
    pub(crate) fn create_room(
        &mut self,
        files: &[(String, usize)],
        contents: &[u8],
        disk_bytes: u64,
    ) -> io::Result<()> {
        if self.disk_bytes.take().is_some() {
            unmount(ROOM_PATH, UnmountFlags::DETACH)?;
        }
        mount("room", ROOM_PATH, "tmpfs", MOUNT_FLAGS, mount_options(disk_bytes)?.as_c_str())?;
        self.disk_bytes = Some(disk_bytes);
        for (directory, mode) in [(WORK, 0o755), ("/room/tmp", 0o1777), ("/room/shm", 0o1777)] {
            fs::create_dir(directory)?;
            fs::set_permissions(directory, Permissions::from_mode(mode))?;
        }
        let mut rest = contents;
        for (path, length) in files {
            let (content, after) = rest
                .split_at_checked(*length)
                .ok_or_else(|| io::Error::other("files are longer than their contents"))?;
            write_file(Path::new(path), content)
                .map_err(|error| io::Error::new(error.kind(), format!("write {path}: {error}")))?;
            rest = after;
        }
        Ok(())
    }

    pub(crate) fn resize_room(&mut self, disk_bytes: u64) -> io::Result<()> {
        match self.disk_bytes {
            None => Err(io::Error::other("it has no directory to run in")),
            Some(now) if now == disk_bytes => Ok(()),
            Some(_) => {
                mount_remount(ROOM_PATH, MOUNT_FLAGS, mount_options(disk_bytes)?)?;
                self.disk_bytes = Some(disk_bytes);
                Ok(())
            }
        }
    }
}

const MOUNT_FLAGS: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

fn mount_options(disk_bytes: u64) -> io::Result<CString> {
    Ok(CString::new(format!("mode=755,size={disk_bytes},nr_inodes={FILES_MAX}"))?)
}

/// Writes an executable file, before any program has run in the room.
fn write_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut parts = path.components();
    if !parts.all(|part| matches!(part, Component::Normal(_))) || path.as_os_str().is_empty() {
        return Err(io::Error::other("the path must lie below the work directory"));
    }
    let path = Path::new(WORK).join(path);
    if let Some(parent) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
    }
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o755).open(path)?;
    file.write_all(content)
}
