//! A child that belongs to this process, not to the thread that asked for it.

use std::{
    io,
    os::{fd::OwnedFd, unix::process::CommandExt},
    process::{Child, Command, ExitStatus},
    sync::{OnceLock, mpsc},
    thread,
};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::sync::{oneshot, watch};

use crate::set_death_signal;

type SpawnRequest = (Command, oneshot::Sender<io::Result<Child>>);

/// A child process in a group of its own, so that Ctrl-C does not reach it. It receives SIGTERM
/// when this process ends for any reason. Dropping it kills it.
#[derive(Debug)]
pub struct OwnedChild {
    pid: u32,
    /// Refers to this process even if its id is reused.
    pidfd: OwnedFd,
    exit_status: watch::Receiver<Option<ExitStatus>>,
}

impl OwnedChild {
    /// Starts a command.
    ///
    /// # Errors
    /// When the program, or a thread that it needs, cannot be started.
    pub async fn spawn(command: Command) -> io::Result<Self> {
        let mut child = spawn_owned(command).await?;
        let pid = child.id();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        let (status_sender, exit_status) = watch::channel(None);
        thread::Builder::new().name("child-wait".to_owned()).spawn(move || {
            if let Ok(status) = child.wait() {
                status_sender.send_replace(Some(status));
            }
        })?;
        Ok(Self { pid, pidfd: pidfd?, exit_status })
    }

    /// Returns the process id.
    pub fn process_id(&self) -> u32 {
        self.pid
    }

    /// Waits until the process ends. Cancel-safe.
    pub async fn wait(&self) -> ExitStatus {
        let mut ended = self.exit_status.clone();
        match ended.wait_for(Option::is_some).await.map(|status| *status) {
            Ok(Some(status)) => status,
            // Waiting for the process failed: its exit status is unknown, and it cannot be watched
            // any longer.
            Ok(None) | Err(_) => ExitStatus::default(),
        }
    }

    /// Sends a signal to the process; does nothing if it has ended.
    pub fn send_signal(&self, signal: Signal) {
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }
}

impl Drop for OwnedChild {
    fn drop(&mut self) {
        self.send_signal(Signal::KILL);
    }
}

/// Starts a command in a process group of its own. The child receives SIGTERM when this process
/// ends for any reason; the thread or task that asked for it may end before. The caller ends the
/// child and waits for it.
///
/// # Errors
/// When the program, or the thread that starts it, cannot be started.
pub async fn spawn_owned(command: Command) -> io::Result<Child> {
    let ended = || io::Error::other("the spawner ended");
    let (answer, spawned) = oneshot::channel();
    spawner_sender().send((command, answer)).map_err(|_| ended())?;
    spawned.await.map_err(|_| ended())?
}

/// Returns the channel to the spawner thread, which is started on first use.
///
/// The kernel sends the death signal when the *thread* that forked ends. One thread that never ends
/// therefore forks all children; tokio retires its blocking threads.
fn spawner_sender() -> &'static mpsc::Sender<SpawnRequest> {
    static SPAWNER: OnceLock<mpsc::Sender<SpawnRequest>> = OnceLock::new();
    SPAWNER.get_or_init(|| {
        let (send, requests) = mpsc::channel::<SpawnRequest>();
        let run = move || {
            for (mut command, answer) in requests {
                command.process_group(0);
                set_death_signal(&mut command, Signal::TERM);
                // If the caller is gone, the child must go too.
                if let Err(Ok(mut child)) = answer.send(command.spawn()) {
                    let _ = child.kill();
                    let _ = child.wait();
                }
            }
        };
        // If the thread cannot be started, every spawn reports that the spawner ended.
        let _ = thread::Builder::new().name("child-spawn".to_owned()).spawn(run);
        send
    })
}
