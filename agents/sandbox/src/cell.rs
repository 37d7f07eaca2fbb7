//! Holding a cell: starts its process, asks it, and ends it.

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
    Ended, Limits, Program,
    cgroup::Group,
    frame::{self, Reply, Request},
};

/// What a cell may take for everything but the program itself, on a busy box.
const GRACE: Duration = Duration::from_secs(30);

/// The sandbox itself failed: nothing is known about the program. The cell must be dropped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the sandbox failed: {0} (V101)")]
pub struct Broken(pub(crate) String);

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        Self(error.to_string())
    }
}

/// One process that runs contained programs, one at a time. Dropping it ends whatever it runs.
#[derive(Debug)]
pub struct Cell {
    child: Child,
    requests: ChildStdin,
    replies: ChildStdout,
    /// Removed after the process.
    _group: Option<Group>,
}

impl Cell {
    pub(crate) fn hold(mut child: Child, group: Option<Group>) -> io::Result<Self> {
        let (requests, replies) = (child.stdin.take(), child.stdout.take());
        let (Some(requests), Some(replies)) = (requests, replies) else {
            return Err(io::Error::other("it was started without pipes"));
        };
        ioctl_fionbio(&requests, true)?;
        Ok(Self { child, requests, replies, _group: group })
    }

    /// A fresh work directory with these files, by paths below it; all may be executed. The room
    /// before it is gone.
    ///
    /// # Errors
    ///
    /// When a path leads elsewhere, when the files do not fit the room, and when the cell fails.
    pub fn room<P: AsRef<str>, C: AsRef<[u8]>>(
        &mut self,
        files: &[(P, C)],
    ) -> Result<Room<'_>, Broken> {
        let heads =
            files.iter().map(|(path, content)| (path.as_ref().to_owned(), content.as_ref().len()));
        let disk_bytes = Limits::default().disk_bytes;
        let request = Request::Room { files: heads.collect(), disk_bytes };
        let contents: Vec<&[u8]> = files.iter().map(|(_, content)| content.as_ref()).collect();
        match self.ask(&request, &contents, Duration::ZERO)? {
            (Reply::Done, _) => Ok(Room { cell: self }),
            (reply, _) => Err(unexpected(reply)),
        }
    }

    pub(crate) fn run(
        &mut self,
        request: &Request,
        input: &[u8],
        wall: Duration,
    ) -> Result<Ended, Broken> {
        match self.ask(request, &[input], wall)? {
            (Reply::Ended { how, wall, stdout }, mut body) if stdout <= body.len() => {
                let stderr = body.split_off(stdout);
                Ok(Ended { how, stdout: body, stderr, wall })
            }
            (reply, _) => Err(unexpected(reply)),
        }
    }

    /// Sends a request and awaits the reply, for as long as it may take and a little longer.
    pub(crate) fn ask(
        &mut self,
        request: &Request,
        body: &[&[u8]],
        wall: Duration,
    ) -> Result<(Reply, Vec<u8>), Broken> {
        let deadline = Instant::now() + GRACE.saturating_add(wall);
        frame::write(&mut Timed { of: &self.requests, deadline }, request, body)?;
        frame::read(&mut Timed { of: &self.replies, deadline })?
            .ok_or_else(|| Broken("its cell ended".into()))
    }
}

pub(crate) fn unexpected(reply: Reply) -> Broken {
    match reply {
        Reply::Broken(problem) => Broken(problem),
        other => Broken(format!("its cell replied {other:?}")),
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        // The inner process dies with it, and so does everything below that one. It may have
        // ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A fresh work directory, in which programs run one after another.
#[derive(Debug)]
pub struct Room<'a> {
    cell: &'a mut Cell,
}

impl Room<'_> {
    /// Runs a program to its end or to its limits. Nothing it started is left afterwards but the
    /// files it wrote to the room, which the next program here finds.
    ///
    /// # Errors
    ///
    /// When the sandbox fails: nothing is known about the program then.
    pub fn run(&mut self, program: &Program, limits: &Limits) -> Result<Ended, Broken> {
        let request = Request::Run { program: program.clone(), limits: limits.clone() };
        self.cell.run(&request, &program.stdin, limits.wall)
    }
}

/// A pipe to or from a process that might say nothing any more.
struct Timed<'a, T> {
    of: &'a T,
    deadline: Instant,
}

impl<T: AsFd> Timed<'_, T> {
    fn await_any(&self, flags: PollFlags) -> io::Result<()> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(self.of, flags)], Some(&left)) {
                Ok(0) => return Err(io::Error::other("its cell does not answer")),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl<T: AsFd> Read for Timed<'_, T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.await_any(PollFlags::IN)?;
        Ok(rustix::io::read(self.of, buffer)?)
    }
}

impl<T: AsFd> Write for Timed<'_, T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.await_any(PollFlags::OUT)?;
        Ok(rustix::io::write(self.of, bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
