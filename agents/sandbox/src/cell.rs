//! The holder's side of a cell: starts its process, sends requests and ends it.

use std::{
    io::{self, Read, Write},
    os::fd::AsFd,
    process::{Child, ChildStdin, ChildStdout},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, ioctl_fionbio},
};

use crate::{
    ProgramLimits, ProgramResult, SandboxProgram,
    cgroup::CellCgroup,
    protocol::{self, CellReply, CellRequest},
};

/// In addition to the program's own limit, for a busy host.
const REPLY_GRACE: Duration = Duration::from_secs(30);

/// A failure of the sandbox itself: nothing is known about the program. The cell must be dropped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the sandbox failed: {0} (V101)")]
pub struct SandboxError(pub(crate) String);

impl From<io::Error> for SandboxError {
    fn from(error: io::Error) -> Self {
        Self(error.to_string())
    }
}

/// A process that runs contained programs, one at a time. Dropping it ends the program that it
/// runs.
#[derive(Debug)]
pub struct SandboxCell {
    process: CellProcess,
    requests: ChildStdin,
    replies: ChildStdout,
    /// Removed after the process has ended.
    group: Option<CellCgroup>,
}

/// The process of a cell, which is killed when this is dropped.
#[derive(Debug)]
struct CellProcess(Option<Child>);

/// A program that runs in a cell of its own until it ends, with the pipes of the child as its
/// standard streams. The child leads a process group; when its stdin is closed or it is killed, the
/// program and everything that it started end. Its exit code is that of the program, or 128 and the
/// number of the signal that ended it.
#[derive(Debug)]
pub struct ConnectedProgram {
    pub child: Child,
    /// Must be dropped after the child has ended.
    pub guard: ConnectedGuard,
}

/// The resources of a connected program's cell.
#[derive(Debug)]
pub struct ConnectedGuard {
    _group: Option<CellCgroup>,
}

impl SandboxCell {
    pub(crate) fn from_child(mut child: Child, group: Option<CellCgroup>) -> io::Result<Self> {
        let (requests, replies) = (child.stdin.take(), child.stdout.take());
        let (Some(requests), Some(replies)) = (requests, replies) else {
            return Err(io::Error::other("it was started without pipes"));
        };
        ioctl_fionbio(&requests, true)?;
        Ok(Self { process: CellProcess(Some(child)), requests, replies, group })
    }

    /// Starts a program in the room that was created last. The limits of time and output do not
    /// apply.
    pub(crate) fn connect_program(
        mut self,
        program: &SandboxProgram,
        limits: &ProgramLimits,
    ) -> Result<ConnectedProgram, SandboxError> {
        let limits = ProgramLimits { wall: Duration::MAX, ..limits.clone() };
        let request = CellRequest::Connect { program: program.clone(), limits };
        match self.send_request(&request, &[], Duration::ZERO)? {
            (CellReply::Done, _) => {}
            (reply, _) => return Err(reply_error(reply)),
        }
        let Self { mut process, requests, replies, group } = self;
        let mut child =
            process.0.take().ok_or_else(|| SandboxError("its process was taken".into()))?;
        (child.stdin, child.stdout) = (Some(requests), Some(replies));
        Ok(ConnectedProgram { child, guard: ConnectedGuard { _group: group } })
    }

    /// Creates a new work directory with these files, by relative paths; all are executable. The
    /// previous room is removed. Fails if a path leads outside or the files do not fit.
    pub fn create_room<P: AsRef<str>, C: AsRef<[u8]>>(
        &mut self,
        files: &[(P, C)],
    ) -> Result<SandboxRoom<'_>, SandboxError> {
        let heads =
            files.iter().map(|(path, content)| (path.as_ref().to_owned(), content.as_ref().len()));
        let disk_bytes = ProgramLimits::default().disk_bytes;
        let request = CellRequest::Room { files: heads.collect(), disk_bytes };
        let contents: Vec<&[u8]> = files.iter().map(|(_, content)| content.as_ref()).collect();
        match self.send_request(&request, &contents, Duration::ZERO)? {
            (CellReply::Done, _) => Ok(SandboxRoom { cell: self }),
            (reply, _) => Err(reply_error(reply)),
        }
    }

    pub(crate) fn run_request(
        &mut self,
        request: &CellRequest,
        input: &[u8],
        wall: Duration,
    ) -> Result<ProgramResult, SandboxError> {
        match self.send_request(request, &[input], wall)? {
            (CellReply::Ended { how, wall, stdout }, mut body) if stdout <= body.len() => {
                let stderr = body.split_off(stdout);
                Ok(ProgramResult { how, stdout: body, stderr, wall })
            }
            (reply, _) => Err(reply_error(reply)),
        }
    }

    /// Waits for the reply at most `wall` plus `REPLY_GRACE`.
    pub(crate) fn send_request(
        &mut self,
        request: &CellRequest,
        body: &[&[u8]],
        wall: Duration,
    ) -> Result<(CellReply, Vec<u8>), SandboxError> {
        let deadline = Instant::now() + REPLY_GRACE.saturating_add(wall);
        protocol::write_message(&mut DeadlineIo { pipe: &self.requests, deadline }, request, body)?;
        protocol::read_message(&mut DeadlineIo { pipe: &self.replies, deadline })?
            .ok_or_else(|| SandboxError("its cell ended".into()))
    }
}

pub(crate) fn reply_error(reply: CellReply) -> SandboxError {
    match reply {
        CellReply::Broken(problem) => SandboxError(problem),
        other => SandboxError(format!("its cell replied {other:?}")),
    }
}

impl Drop for CellProcess {
    fn drop(&mut self) {
        let Some(child) = &mut self.0 else { return };
        // The inner process dies with this one, and all processes below it too. It may have ended
        // already.
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// A work directory in which programs run one after another.
#[derive(Debug)]
pub struct SandboxRoom<'a> {
    cell: &'a mut SandboxCell,
}

impl SandboxRoom<'_> {
    /// Runs a program until it ends or reaches a limit. Nothing that it started is left then,
    /// except the files that it wrote to the room, which the next program sees. After an error
    /// nothing is known about the program.
    pub fn run(
        &mut self,
        program: &SandboxProgram,
        limits: &ProgramLimits,
    ) -> Result<ProgramResult, SandboxError> {
        let request = CellRequest::Run { program: program.clone(), limits: limits.clone() };
        self.cell.run_request(&request, &program.stdin, limits.wall)
    }
}

struct DeadlineIo<'a, T> {
    pipe: &'a T,
    deadline: Instant,
}

impl<T: AsFd> DeadlineIo<'_, T> {
    /// Fails at the deadline.
    fn wait_ready(&self, flags: PollFlags) -> io::Result<()> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(self.pipe, flags)], Some(&left)) {
                Ok(0) => return Err(io::Error::other("its cell does not answer")),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl<T: AsFd> Read for DeadlineIo<'_, T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.wait_ready(PollFlags::IN)?;
        Ok(rustix::io::read(self.pipe, buffer)?)
    }
}

impl<T: AsFd> Write for DeadlineIo<'_, T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait_ready(PollFlags::OUT)?;
        Ok(rustix::io::write(self.pipe, bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
