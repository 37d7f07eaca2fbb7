//! Small file systems, and files that fill them.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread::JoinHandle,
    time::Duration,
};

use requirements::skip_test;

/// How long space that a program frees stays free.
const REFILL: Duration = Duration::from_millis(5);

/// A mounted tmpfs of a few MiB.
pub struct SmallDisk {
    path: PathBuf,
}

impl SmallDisk {
    /// Mounts the file system. Records this test as skipped and returns `None` if mounts are not
    /// permitted.
    pub fn mount(path: PathBuf, size: &str) -> Option<Self> {
        std::fs::create_dir_all(&path).expect("a directory");
        let options = format!("size={size}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(&path)
            .output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(Self { path });
        }
        skip_test("mounts", "run the tests as root, and permit mounts in the container");
        None
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Changes the size and returns true on success.
    pub fn resize(&self, size: &str) -> bool {
        let options = format!("remount,size={size}");
        let mounted = Command::new("mount").args(["-o", &options]).arg(&self.path).status();
        mounted.is_ok_and(|status| status.success())
    }

    /// Fills the file system to the last byte, and keeps it full until the result is dropped: a
    /// program that removes a file of its own gets no space by it.
    pub fn fill(&self) -> FullDisk {
        let path = self.path.join("ballast");
        let file = OpenOptions::new().create_new(true).append(true).open(&path).expect("a file");
        fill_with(&file);
        let (stop, stopped) = channel::<()>();
        let filler = std::thread::spawn(move || {
            while stopped.recv_timeout(REFILL) == Err(RecvTimeoutError::Timeout) {
                fill_with(&file);
            }
        });
        FullDisk { path, stop: Some(stop), filler: Some(filler) }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.path).status();
    }
}

/// Keeps a file system full. Its space is free again when this is dropped.
pub struct FullDisk {
    path: PathBuf,
    stop: Option<Sender<()>>,
    filler: Option<JoinHandle<()>>,
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        drop(self.stop.take());
        let filled = self.filler.take().is_none_or(|filler| filler.join().is_ok());
        let removed = std::fs::remove_file(&self.path);
        assert!(std::thread::panicking() || (filled && removed.is_ok()), "{removed:?}");
    }
}

/// Appends to a file until not one byte more can be written.
fn fill_with(mut file: &File) {
    for size in [1 << 16, 1 << 10, 1] {
        let bytes = vec![0x5a_u8; size];
        while file.write_all(&bytes).is_ok() {}
    }
}
