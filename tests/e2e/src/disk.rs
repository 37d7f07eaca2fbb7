//! Small file systems, and files that fill them.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use requirements::skip_test;

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

    /// Fills the file system to the last byte.
    pub fn fill(&self) {
        let mut file = File::create(self.ballast_path()).expect("a file");
        for size in [1 << 16, 1 << 10, 1] {
            let bytes = vec![0x5a_u8; size];
            while file.write_all(&bytes).is_ok() {}
        }
    }

    /// Returns true if no byte more can be written.
    pub fn is_full(&self) -> bool {
        let space = rustix::fs::statvfs(&self.path).expect("a file system");
        space.f_bavail == 0
    }

    /// Removes the file that `fill` wrote.
    pub fn free_space(&self) {
        std::fs::remove_file(self.ballast_path()).expect("it was filled");
    }

    fn ballast_path(&self) -> PathBuf {
        self.path.join("ballast")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.path).status();
    }
}
