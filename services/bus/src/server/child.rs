//! One child process that dies with ours, and how it ended.

use std::{
    io,
    os::{fd::OwnedFd, unix::process::CommandExt},
    process::{Command, ExitStatus},
    sync::{OnceLock, mpsc},
    thread,
};

use rustix::process::{Pid, PidfdFlags, Signal, getpid, getppid, pidfd_open, pidfd_send_signal};
use tokio::sync::{oneshot, watch};

type Spawned = io::Result<std::process::Child>;
type Request = (Command, oneshot::Sender<Spawned>);

#[derive(Debug)]
pub(super) struct Child {
    pid: u32,
    /// Stays with this process even when its number is given to another.
    pidfd: OwnedFd,
    ended: watch::Receiver<Option<ExitStatus>>,
}

/// Starts a process in a group of its own (Ctrl-C is not for it), which gets SIGTERM when
/// this process ends in whatever way.
pub(super) async fn spawn(command: Command) -> io::Result<Child> {
    let (answer, spawned) = oneshot::channel();
    spawner().send((command, answer)).map_err(|_| io::Error::other("the spawner ended"))?;
    let mut child = spawned.await.map_err(|_| io::Error::other("the spawner ended"))??;
    let pid = child.id();
    let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
    let (end, ended) = watch::channel(None);
    thread::Builder::new().name("nats-server-wait".to_owned()).spawn(move || {
        if let Ok(status) = child.wait() {
            end.send_replace(Some(status));
        }
    })?;
    Ok(Child { pid, pidfd: pidfd?, ended })
}

/// The kernel sends the death signal when the *thread* that forked ends, so all children
/// are forked by one thread that never does (tokio retires its blocking threads).
fn spawner() -> &'static mpsc::Sender<Request> {
    static SPAWNER: OnceLock<mpsc::Sender<Request>> = OnceLock::new();
    SPAWNER.get_or_init(|| {
        let (send, requests) = mpsc::channel::<Request>();
        let run = move || {
            for (mut command, answer) in requests {
                die_with_us(&mut command);
                // The caller may have gone; then the child must go as well.
                if let Err(Ok(mut child)) = answer.send(command.spawn()) {
                    let _ = child.kill();
                    let _ = child.wait();
                }
            }
        };
        // Without the thread every spawn reports that the spawner ended.
        let _ = thread::Builder::new().name("nats-server-spawn".to_owned()).spawn(run);
        send
    })
}

#[expect(unsafe_code, reason = "pre_exec is the only way to set a parent death signal")]
fn die_with_us(command: &mut Command) {
    let parent = getpid();
    command.process_group(0);
    // SAFETY: between fork and exec only two system calls are made; nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            // We may have died before the signal was set.
            if getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
        });
    }
}

impl Child {
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Cancel-safe.
    pub(super) async fn wait(&self) -> ExitStatus {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await.map(|status| *status) {
            Ok(Some(status)) => status,
            // Our own wait failed: nobody knows how it ended, only that it cannot be watched.
            Ok(None) | Err(_) => ExitStatus::default(),
        }
    }

    pub(super) fn signal(&self, signal: Signal) {
        // Fails when the process has ended, which is what was wanted.
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}
