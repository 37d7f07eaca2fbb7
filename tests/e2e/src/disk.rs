//! Small file systems, and files that fill them.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

/// A file system of a few MiB, where this machine lets us have one.
pub struct SmallDisk {
    path: PathBuf,
}

impl SmallDisk {
    /// # Panics
    /// When there can be no such directory.
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
        println!("skipped: a tmpfs cannot be mounted here");
        None
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it another size. Whether that worked.
    pub fn resize(&self, size: &str) -> bool {
        let options = format!("remount,size={size}");
        let mounted = Command::new("mount").args(["-o", &options]).arg(&self.path).status();
        mounted.is_ok_and(|status| status.success())
    }

    /// Writes until not a byte fits.
    ///
    /// # Panics
    /// When it cannot be written to at all.
    pub fn fill(&self) {
        let mut file = File::create(self.ballast()).expect("a file");
        for size in [1 << 16, 1 << 10, 1] {
            let bytes = vec![0x5a_u8; size];
            while file.write_all(&bytes).is_ok() {}
        }
    }

    /// Takes away what `fill` wrote.
    ///
    /// # Panics
    /// When it was not filled.
    pub fn free(&self) {
        std::fs::remove_file(self.ballast()).expect("it was filled");
    }

    fn ballast(&self) -> PathBuf {
        self.path.join("ballast")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.path).status();
    }
}
