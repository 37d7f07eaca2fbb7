//! Child processes that end with their test.

use std::{
    os::unix::process::CommandExt,
    process::{Child, Command},
};

use rustix::process::{Pid, Signal, kill_process_group};

/// Kills the process when it is dropped, and waits for its end.
#[derive(Debug)]
pub struct ChildGuard(pub Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process in a group of its own. The group is killed when it is dropped: some servers leave their
/// workers behind.
#[derive(Debug)]
pub struct GroupGuard(pub Child);

impl GroupGuard {
    /// Starts a program as the first of its group.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(command: &mut Command) -> Self {
        Self(command.process_group(0).spawn().expect("the program starts"))
    }
}

impl Drop for GroupGuard {
    fn drop(&mut self) {
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        let _ = self.0.wait();
    }
}
