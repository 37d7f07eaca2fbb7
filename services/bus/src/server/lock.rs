//! A directory for one process at a time: nats-server itself starts happily on a store
//! that another is using. The lock is the kernel's, so it ends with this process; files
//! are opened close-on-exec, so no child inherits it.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, Write},
    path::Path,
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

const NAME: &str = "lock";

#[derive(Debug)]
pub(super) struct DirLock {
    _file: File,
}

impl DirLock {
    /// The lock, or who has it.
    pub(super) fn take(dir: &Path) -> io::Result<Result<Self, String>> {
        let path = dir.join(NAME);
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(Err(holder(&mut file))),
            Err(error) => return Err(error.into()),
        }
        file.set_len(0)?;
        file.rewind()?;
        write!(file, "{}", std::process::id())?;
        Ok(Ok(Self { _file: file }))
    }
}

fn holder(file: &mut File) -> String {
    let mut pid = String::new();
    // It is only for the message.
    let _ = file.read_to_string(&mut pid);
    if pid.is_empty() { "another process".to_owned() } else { format!("process {pid}") }
}
