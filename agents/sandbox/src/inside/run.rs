//! Runs one program: feeds its input, reads its output, enforces its limits and ends everything
//! that it started.

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
    ProgramEnd, ProgramLimits, ProgramResult,
    syscalls::{ForkSide, PROGRAM_NAMESPACES, fork_into},
};

use super::{
    cgroup_files::CgroupFiles,
    init::{self, CellJob, InitReport, ProgramPipes, ProgramStart},
    memory_watch::{self, MemoryExcess},
    syscall_filter,
};

const MEMORY_CHECK_INTERVAL: Duration = Duration::from_millis(20);

const READ_CHUNK_BYTES: usize = 64 * 1024;

/// Shared by all programs of a cell.
pub(crate) struct ProgramRunner {
    filter: syscall_filter::ProgramFilter,
    group: Option<CgroupFiles>,
    cores: u64,
}

impl ProgramRunner {
    pub(crate) fn new(filter: syscall_filter::ProgramFilter, group: Option<CgroupFiles>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        Self { filter, group, cores }
    }

    /// Ends this process if the holder is gone.
    pub(crate) fn run(
        &self,
        job: &CellJob,
        input: &[u8],
        limits: &ProgramLimits,
        holder: &File,
    ) -> io::Result<ProgramResult> {
        let killed = self.group.as_ref().map(CgroupFiles::oom_kill_count).transpose()?;
        if let Some(group) = &self.group {
            group.set_limits(limits)?;
        }
        let (stdin, feed) = pipe()?;
        let (output, stdout) = pipe()?;
        let (errors, stderr) = pipe()?;
        let (reports, report) = pipe()?;
        ioctl_fionbio(&feed, true)?;
        let began = Instant::now();
        let order = ProgramStart { job, limits, cores: self.cores, filter: &self.filter };
        let first = match fork_into(PROGRAM_NAMESPACES)? {
            ForkSide::Parent(first) => first,
            ForkSide::Child => {
                // The program's input ends only when all writers have closed it.
                drop(feed);
                init::run_init(&order, ProgramPipes { stdin, stdout, stderr, report })
            }
        };
        drop((stdin, stdout, stderr, report));
        let mut talk = ProgramIo {
            input: Some((feed, input)),
            output: OutputPipe::new(output),
            errors: OutputPipe::new(errors),
            report: OutputPipe::new(reports),
            output_max: usize::try_from(limits.output_bytes).unwrap_or(usize::MAX),
        };
        let how = talk.poll_until_end(limits, began, holder);
        let wall = began.elapsed();
        kill_namespace(first)?;
        let mut ended = talk.into_result(how?, wall)?;
        let by_kernel = self.group.as_ref().map(CgroupFiles::oom_kill_count).transpose()? > killed;
        if by_kernel && matches!(ended.how, ProgramEnd::Exited(_) | ProgramEnd::Signalled(_)) {
            ended.how = ProgramEnd::OutOfMemory;
        }
        Ok(ended)
    }
}

/// Waits for the first process, which the kernel lets end only after all others of the namespace.
fn kill_namespace(first: Pid) -> io::Result<()> {
    match kill_process(first, Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => return Err(error.into()),
    }
    waitpid(Some(first), WaitOptions::empty())?;
    Ok(())
}

struct OutputPipe {
    reader: Option<PipeReader>,
    bytes: Vec<u8>,
}

impl OutputPipe {
    fn new(from: PipeReader) -> Self {
        Self { reader: Some(from), bytes: Vec::new() }
    }

    fn read_chunk(&mut self) -> io::Result<()> {
        let Some(from) = &mut self.reader else { return Ok(()) };
        let mut chunk = [0; READ_CHUNK_BYTES];
        let count = from.read(&mut chunk)?;
        self.bytes.extend_from_slice(&chunk[..count]);
        if count == 0 {
            self.reader = None;
        }
        Ok(())
    }
}

struct ProgramIo<'a> {
    input: Option<(PipeWriter, &'a [u8])>,
    output: OutputPipe,
    errors: OutputPipe,
    report: OutputPipe,
    output_max: usize,
}

#[derive(Default)]
struct ReadyPipes {
    input: bool,
    output: bool,
    errors: bool,
    report: bool,
    holder_gone: bool,
}

impl ProgramIo<'_> {
    /// Serves the pipes until a limit; `None` if the program's end is in the report.
    fn poll_until_end(
        &mut self,
        limits: &ProgramLimits,
        began: Instant,
        holder: &File,
    ) -> io::Result<Option<ProgramEnd>> {
        let mut next_look = began + MEMORY_CHECK_INTERVAL;
        while self.report.reader.is_some() && !self.report.bytes.ends_with(b"\n") {
            let now = Instant::now();
            let left = limits.wall.saturating_sub(now - began);
            if left.is_zero() {
                return Ok(Some(ProgramEnd::TimedOut));
            }
            if now >= next_look {
                next_look = now + MEMORY_CHECK_INTERVAL;
                match memory_watch::check_memory(limits.memory_bytes)? {
                    None => {}
                    Some(MemoryExcess::Program) => return Ok(Some(ProgramEnd::OutOfMemory)),
                    Some(MemoryExcess::Host) => {
                        return Err(io::Error::other("the box has hardly any memory left"));
                    }
                }
            }
            let ready =
                self.wait_ready(left.min(next_look.saturating_duration_since(now)), holder)?;
            if ready.holder_gone {
                // The end of the first process ends all others of the cell's namespaces.
                std::process::exit(0);
            }
            self.serve_ready(&ready)?;
            if self.exceeds_output() {
                return Ok(Some(ProgramEnd::OutputTooLong));
            }
        }
        Ok(None)
    }

    fn exceeds_output(&self) -> bool {
        self.output.bytes.len() + self.errors.bytes.len() > self.output_max
    }

    fn wait_ready(&self, limit: Duration, holder: &File) -> io::Result<ReadyPipes> {
        let mut ready = ReadyPipes::default();
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
            if let Some(from) = &stream.reader {
                polled.push(PollFd::new(from, PollFlags::IN));
                slots.push(slot);
            }
        }
        match poll(&mut polled, Some(&Timespec::try_from(limit).map_err(io::Error::other)?)) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(ReadyPipes::default()),
            Err(error) => return Err(error.into()),
        }
        for (polled, slot) in polled.iter().zip(slots) {
            *slot = !polled.revents().is_empty();
        }
        Ok(ready)
    }

    fn serve_ready(&mut self, ready: &ReadyPipes) -> io::Result<()> {
        if ready.input {
            self.feed_input();
        }
        if ready.output {
            self.output.read_chunk()?;
        }
        if ready.errors {
            self.errors.read_chunk()?;
        }
        if ready.report {
            self.report.read_chunk()?;
        }
        Ok(())
    }

    /// Drops the rest if the program closed its input.
    fn feed_input(&mut self) {
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

    /// Reads the remaining output, now that all writers are gone.
    fn into_result(mut self, how: Option<ProgramEnd>, wall: Duration) -> io::Result<ProgramResult> {
        for stream in [&mut self.output, &mut self.errors, &mut self.report] {
            while stream.reader.is_some() && stream.bytes.len() <= self.output_max {
                stream.read_chunk()?;
            }
        }
        let how = match how {
            Some(how) => how,
            None if self.exceeds_output() => ProgramEnd::OutputTooLong,
            None => read_report(&self.report.bytes)?,
        };
        let (mut stdout, mut stderr) = (self.output.bytes, self.errors.bytes);
        stdout.truncate(self.output_max);
        stderr.truncate(self.output_max - stdout.len());
        Ok(ProgramResult { how, stdout, stderr, wall })
    }
}

fn read_report(bytes: &[u8]) -> io::Result<ProgramEnd> {
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    match serde_json::from_slice(line) {
        Ok(InitReport::Ended(how)) => Ok(how),
        Ok(InitReport::Broken(problem)) => Err(io::Error::other(problem)),
        Err(_) => Err(io::Error::other("the first process of the program's namespaces was killed")),
    }
}
