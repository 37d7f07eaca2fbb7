//! Starting the process of a program.

use std::{
    any::Any,
    fmt, io,
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use futures::future::{BoxFuture, FutureExt};
use process::{ChildPid, spawn_owned};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};

/// The interval at which an ending process is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Starts processes of one program, all alike.
pub trait ProgramLauncher: Send + Sync {
    /// Starts one process. The error describes what failed.
    fn launch_program(&self) -> BoxFuture<'_, Result<LaunchedProgram, String>>;
}

/// A process that was started with pipes as its three standard streams, in a process group of its
/// own. Dropping it kills the group.
pub struct LaunchedProgram {
    child: Child,
    /// True after the process has been waited for: its id may belong to another one.
    is_reaped: bool,
    /// Dropped after the process has ended.
    _guard: Option<Box<dyn Any + Send>>,
}

pub(crate) struct StandardPipes {
    pub stdin: ChildStdin,
    pub stdout: ChildStdout,
    pub stderr: ChildStderr,
}

impl LaunchedProgram {
    /// Takes over a child that leads its process group. The guard, if any, is dropped after the
    /// child has ended.
    pub fn new(child: Child, guard: Option<Box<dyn Any + Send>>) -> Self {
        Self { child, is_reaped: false, _guard: guard }
    }

    /// Returns `None` if one of the streams is not a pipe, or was taken before.
    pub(crate) fn take_pipes(&mut self) -> Option<StandardPipes> {
        let (stdin, stdout, stderr) =
            (self.child.stdin.take(), self.child.stdout.take(), self.child.stderr.take());
        Some(StandardPipes { stdin: stdin?, stdout: stdout?, stderr: stderr? })
    }

    /// Waits for the end of the process, which is near, and kills the rest of its group. Returns
    /// `None` if it still runs at the limit.
    pub(crate) async fn wait_exit(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        while !self.has_exited() {
            if Instant::now() >= deadline {
                return None;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        self.end_group().ok()
    }

    /// Returns true if the process has exited. It is not reaped, so its id is not reused.
    fn has_exited(&self) -> bool {
        let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) else {
            return true;
        };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        // An error means that there is nothing to wait for.
        !matches!(waitid(WaitId::Pid(pid), options), Ok(None))
    }

    /// Kills all processes of the group and waits for the first one.
    fn end_group(&mut self) -> io::Result<ExitStatus> {
        if !self.is_reaped
            && let Some(pid) = ChildPid::from_id(self.child.id())
        {
            pid.signal_group(Signal::KILL);
        }
        let status = self.child.wait()?;
        self.is_reaped = true;
        Ok(status)
    }
}

impl fmt::Debug for LaunchedProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LaunchedProgram").field(&self.child.id()).finish()
    }
}

impl Drop for LaunchedProgram {
    fn drop(&mut self) {
        // Nothing is left to end if waiting fails.
        let _ = self.end_group();
    }
}

/// Starts a command on this host, without containing it.
pub struct CommandLauncher {
    build: Box<dyn Fn() -> Command + Send + Sync>,
}

impl CommandLauncher {
    /// Creates a launcher of the commands that `build` returns, all alike.
    pub fn new(build: impl Fn() -> Command + Send + Sync + 'static) -> Self {
        Self { build: Box::new(build) }
    }
}

impl fmt::Debug for CommandLauncher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CommandLauncher")
    }
}

impl ProgramLauncher for CommandLauncher {
    fn launch_program(&self) -> BoxFuture<'_, Result<LaunchedProgram, String>> {
        let mut command = (self.build)();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let name = command.get_program().display().to_string();
        async move {
            let spawned = spawn_owned(command).await;
            let child = spawned.map_err(|error| format!("start {name}: {error}"))?;
            Ok(LaunchedProgram::new(child, None))
        }
        .boxed()
    }
}
