//! Runs one program: feeds it, reads it, watches its limits, and ends all it started.

use std::{
    fs::File,
    io::{self, ErrorKind, PipeReader, PipeWriter, Read, Write, pipe},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, ioctl_fionbio},
    process::{Pid, Signal, WaitOptions, kill_process, waitpid},
};

use crate::{
    Ended, How, Limits,
    kernel::{Fork, PROGRAM_NAMESPACES, fork},
};

use super::{
    filter,
    group::Group,
    init::{self, Ends, Job, Order, Report},
    look::{self, Excess},
};

/// Between two looks at its memory.
const LOOK_EVERY: Duration = Duration::from_millis(20);

const CHUNK_BYTES: usize = 64 * 1024;

/// What programs of a cell have in common.
pub(crate) struct Runner {
    filter: filter::Program,
    group: Option<Group>,
    cores: u64,
}

impl Runner {
    pub(crate) fn new(filter: filter::Program, group: Option<Group>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        Self { filter, group, cores }
    }

    /// Runs it to its end or to its limits. Leaves the process when the holder is gone.
    pub(crate) fn run(
        &self,
        job: &Job,
        input: &[u8],
        limits: &Limits,
        holder: &File,
    ) -> io::Result<Ended> {
        let killed = self.group.as_ref().map(Group::killed).transpose()?;
        if let Some(group) = &self.group {
            group.limit(limits)?;
        }
        let (stdin, feed) = pipe()?;
        let (output, stdout) = pipe()?;
        let (errors, stderr) = pipe()?;
        let (reports, report) = pipe()?;
        ioctl_fionbio(&feed, true)?;
        let began = Instant::now();
        let order = Order { job, limits, cores: self.cores, filter: &self.filter };
        let first = match fork(PROGRAM_NAMESPACES)? {
            Fork::Parent(first) => first,
            Fork::Child => {
                // An input ends when nobody can write to it any more.
                drop(feed);
                init::run(&order, Ends { stdin, stdout, stderr, report })
            }
        };
        drop((stdin, stdout, stderr, report));
        let mut talk = Talk {
            input: Some((feed, input)),
            output: Stream::new(output),
            errors: Stream::new(errors),
            report: Stream::new(reports),
            output_max: usize::try_from(limits.output_bytes).unwrap_or(usize::MAX),
        };
        let how = talk.attend(limits, began, holder);
        let wall = began.elapsed();
        end(first)?;
        let mut ended = talk.finish(how?, wall)?;
        let by_kernel = self.group.as_ref().map(Group::killed).transpose()? > killed;
        if by_kernel && matches!(ended.how, How::Exited(_) | How::Signalled(_)) {
            ended.how = How::OutOfMemory;
        }
        Ok(ended)
    }
}

/// Ends the first process of the program's namespaces, and with it all others: its end is
/// awaited by the kernel until they are gone.
fn end(first: Pid) -> io::Result<()> {
    match kill_process(first, Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => return Err(error.into()),
    }
    waitpid(Some(first), WaitOptions::empty())?;
    Ok(())
}

/// One end of a pipe and what came out of it.
struct Stream {
    from: Option<PipeReader>,
    bytes: Vec<u8>,
}

impl Stream {
    fn new(from: PipeReader) -> Self {
        Self { from: Some(from), bytes: Vec::new() }
    }

    /// Takes what is there, or what comes next.
    fn take(&mut self) -> io::Result<()> {
        let Some(from) = &mut self.from else { return Ok(()) };
        let mut chunk = [0; CHUNK_BYTES];
        let count = from.read(&mut chunk)?;
        self.bytes.extend_from_slice(&chunk[..count]);
        if count == 0 {
            self.from = None;
        }
        Ok(())
    }
}

/// All pipes of a program.
struct Talk<'a> {
    input: Option<(PipeWriter, &'a [u8])>,
    output: Stream,
    errors: Stream,
    report: Stream,
    output_max: usize,
}

/// Which pipes have something to do.
#[derive(Default)]
struct Ready {
    input: bool,
    output: bool,
    errors: bool,
    report: bool,
    holder_gone: bool,
}

impl Talk<'_> {
    /// Until the program has ended or reached a limit; `None` when its end is in the report.
    fn attend(
        &mut self,
        limits: &Limits,
        began: Instant,
        holder: &File,
    ) -> io::Result<Option<How>> {
        let mut next_look = began + LOOK_EVERY;
        while self.report.from.is_some() && !self.report.bytes.ends_with(b"\n") {
            let now = Instant::now();
            let left = limits.wall.saturating_sub(now - began);
            if left.is_zero() {
                return Ok(Some(How::TimedOut));
            }
            if now >= next_look {
                next_look = now + LOOK_EVERY;
                match look::memory(limits.memory_bytes)? {
                    None => {}
                    Some(Excess::Program) => return Ok(Some(How::OutOfMemory)),
                    Some(Excess::Box) => {
                        return Err(io::Error::other("the box has hardly any memory left"));
                    }
                }
            }
            let ready = self.wait(left.min(next_look.saturating_duration_since(now)), holder)?;
            if ready.holder_gone {
                // The first process of the cell's namespaces takes all others with it.
                std::process::exit(0);
            }
            self.act(&ready)?;
            if self.is_too_long() {
                return Ok(Some(How::OutputTooLong));
            }
        }
        Ok(None)
    }

    fn is_too_long(&self) -> bool {
        self.output.bytes.len() + self.errors.bytes.len() > self.output_max
    }

    fn wait(&self, limit: Duration, holder: &File) -> io::Result<Ready> {
        let mut ready = Ready::default();
        let (mut polled, mut slots) = (Vec::with_capacity(5), Vec::with_capacity(5));
        polled.push(PollFd::new(holder, PollFlags::empty()));
        slots.push(&mut ready.holder_gone);
        if let Some((feed, _)) = &self.input {
            polled.push(PollFd::new(feed, PollFlags::OUT));
            slots.push(&mut ready.input);
        }
        let streams = [
            (&self.output, &mut ready.output),
            (&self.errors, &mut ready.errors),
            (&self.report, &mut ready.report),
        ];
        for (stream, slot) in streams {
            if let Some(from) = &stream.from {
                polled.push(PollFd::new(from, PollFlags::IN));
                slots.push(slot);
            }
        }
        match poll(&mut polled, Some(&Timespec::try_from(limit).map_err(io::Error::other)?)) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Ready::default()),
            Err(error) => return Err(error.into()),
        }
        for (polled, slot) in polled.iter().zip(slots) {
            *slot = !polled.revents().is_empty();
        }
        Ok(ready)
    }

    fn act(&mut self, ready: &Ready) -> io::Result<()> {
        if ready.input {
            self.feed();
        }
        if ready.output {
            self.output.take()?;
        }
        if ready.errors {
            self.errors.take()?;
        }
        if ready.report {
            self.report.take()?;
        }
        Ok(())
    }

    /// Writes what the pipe takes. A program that closed its input needs no more.
    fn feed(&mut self) {
        let Some((feed, rest)) = &mut self.input else { return };
        match feed.write(rest) {
            Ok(count) => *rest = &rest[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Err(_) => *rest = &[],
        }
        if rest.is_empty() {
            self.input = None;
        }
    }

    /// Reads what is left, now that nobody can write any more.
    fn finish(mut self, how: Option<How>, wall: Duration) -> io::Result<Ended> {
        for stream in [&mut self.output, &mut self.errors, &mut self.report] {
            while stream.from.is_some() && stream.bytes.len() <= self.output_max {
                stream.take()?;
            }
        }
        let how = match how {
            Some(how) => how,
            None if self.is_too_long() => How::OutputTooLong,
            None => read_report(&self.report.bytes)?,
        };
        let (mut stdout, mut stderr) = (self.output.bytes, self.errors.bytes);
        stdout.truncate(self.output_max);
        stderr.truncate(self.output_max - stdout.len());
        Ok(Ended { how, stdout, stderr, wall })
    }
}

fn read_report(bytes: &[u8]) -> io::Result<How> {
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    match serde_json::from_slice(line) {
        Ok(Report::Ended(how)) => Ok(how),
        Ok(Report::Broken(problem)) => Err(io::Error::other(problem)),
        Err(_) => Err(io::Error::other("the first process of the program's namespaces was killed")),
    }
}
