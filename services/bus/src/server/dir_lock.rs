//! Locks a directory for one process, because nats-server itself starts on a store that another
//! server uses. The kernel releases the lock when this process ends; files are opened
//! close-on-exec, so no child inherits it.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, Write},
    path::Path,
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

const LOCK_FILE: &str = "lock";

#[derive(Debug)]
pub(super) struct DirLock {
    _file: File,
}

impl DirLock {
    /// Does not wait. The inner error describes the process that holds the lock.
    pub(super) fn acquire_lock(dir: &Path) -> io::Result<Result<Self, String>> {
        let path = dir.join(LOCK_FILE);
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(Err(read_holder(&mut file))),
            Err(error) => return Err(error.into()),
        }
        file.set_len(0)?;
        file.rewind()?;
        write!(file, "{}", std::process::id())?;
        Ok(Ok(Self { _file: file }))
    }
}

fn read_holder(file: &mut File) -> String {
    let mut pid = String::new();
    // The process id is only for the message.
    let _ = file.read_to_string(&mut pid);
    if pid.is_empty() { "another process".to_owned() } else { format!("process {pid}") }
}
