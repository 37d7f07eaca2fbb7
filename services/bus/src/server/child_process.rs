//! One child process that dies with this process, and its exit status.

use std::{
    io,
    os::{fd::OwnedFd, unix::process::CommandExt},
    process::{Command, ExitStatus},
    sync::{OnceLock, mpsc},
    thread,
};

use rustix::process::{Pid, PidfdFlags, Signal, getpid, getppid, pidfd_open, pidfd_send_signal};
use tokio::sync::{oneshot, watch};

type SpawnResult = io::Result<std::process::Child>;
type SpawnRequest = (Command, oneshot::Sender<SpawnResult>);

/// A child process. Dropping it kills the process.
#[derive(Debug)]
pub(super) struct ServerProcess {
    pid: u32,
    /// Refers to this process even if its id is reused.
    pidfd: OwnedFd,
    exit_status: watch::Receiver<Option<ExitStatus>>,
}

/// Starts a process in its own group, so that Ctrl-C does not reach it. It receives SIGTERM when
/// this process ends for any reason.
pub(super) async fn spawn_process(command: Command) -> io::Result<ServerProcess> {
    let (answer, spawned) = oneshot::channel();
    spawner_sender().send((command, answer)).map_err(|_| io::Error::other("the spawner ended"))?;
    let mut child = spawned.await.map_err(|_| io::Error::other("the spawner ended"))??;
    let pid = child.id();
    let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
    let (end, ended) = watch::channel(None);
    thread::Builder::new().name("nats-server-wait".to_owned()).spawn(move || {
        if let Ok(status) = child.wait() {
            end.send_replace(Some(status));
        }
    })?;
    Ok(ServerProcess { pid, pidfd: pidfd?, exit_status: ended })
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
                set_death_signal(&mut command);
                // If the caller is gone, the child must go too.
                if let Err(Ok(mut child)) = answer.send(command.spawn()) {
                    let _ = child.kill();
                    let _ = child.wait();
                }
            }
        };
        // If the thread cannot be started, every spawn reports that the spawner ended.
        let _ = thread::Builder::new().name("nats-server-spawn".to_owned()).spawn(run);
        send
    })
}

/// Makes the kernel send SIGTERM to the child when this process ends.
#[expect(unsafe_code, reason = "pre_exec is the only way to set a parent death signal")]
fn set_death_signal(command: &mut Command) {
    let parent = getpid();
    command.process_group(0);
    // SAFETY: between fork and exec only two system calls are made and no memory is allocated.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            // The parent may have died before the signal was set.
            if getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
        });
    }
}

impl ServerProcess {
    /// Returns the process id.
    pub(super) fn process_id(&self) -> u32 {
        self.pid
    }

    /// Waits until the process ends. Cancel-safe.
    pub(super) async fn wait(&self) -> ExitStatus {
        let mut ended = self.exit_status.clone();
        match ended.wait_for(Option::is_some).await.map(|status| *status) {
            Ok(Some(status)) => status,
            // Waiting for the process failed: its exit status is unknown, and it cannot be watched
            // any longer.
            Ok(None) | Err(_) => ExitStatus::default(),
        }
    }

    /// Sends a signal to the process; does nothing if it has ended.
    pub(super) fn send_signal(&self, signal: Signal) {
        // This fails if the process has ended, which is the goal.
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.send_signal(Signal::KILL);
    }
}
