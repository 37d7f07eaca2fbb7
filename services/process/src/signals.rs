//! Signals to children and their process groups.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::process::Child;

/// The process id of a child, to send it signals.
///
/// Use it only until the child has been waited for: after that, the id may belong to another
/// process. A signal to a child that has just ended does nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChildPid(Pid);

impl ChildPid {
    /// Converts the id that the standard library or tokio reports.
    pub fn from_id(id: u32) -> Option<Self> {
        i32::try_from(id).ok().and_then(Pid::from_raw).map(Self)
    }

    /// Sends a signal to the child alone.
    pub fn send_signal(self, signal: Signal) {
        let _ = kill_process(self.0, signal);
    }

    /// Sends a signal to all processes of the group that the child leads.
    pub fn signal_group(self, signal: Signal) {
        let _ = kill_process_group(self.0, signal);
    }
}

/// Sends SIGTERM to a child, then SIGKILL if it still runs after `limit`, and waits for its end.
pub async fn terminate_child(child: &mut Child, limit: Duration) {
    let Some(pid) = child.id().and_then(ChildPid::from_id) else { return };
    pid.send_signal(Signal::TERM);
    if tokio::time::timeout(limit, child.wait()).await.is_err() {
        pid.send_signal(Signal::KILL);
        let _ = child.wait().await;
    }
}
