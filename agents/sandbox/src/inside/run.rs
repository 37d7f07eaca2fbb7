//! Runs one program: feeds its input, reads its output, enforces its limits and ends everything
//! that it started.

use std::{
    fs::File,
    io::{self, ErrorKind, PipeReader, PipeWriter, Read, Write, pipe},
    os::fd::AsFd,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, ioctl_fionbio},
    process::{Pid, Signal, WaitOptions, kill_process, waitpid},
};

use crate::{
    ProgramEnd, ProgramLimits, ProgramResult, SandboxProgram,
    syscalls::{ForkSide, PROGRAM_NAMESPACES, fork_into},
};

use super::{
    HolderPipes,
    cgroup_files::CgroupFiles,
    init::{self, CellJob, InitReport, ProgramPipes, ProgramStart},
    memory_watch::{self, MemoryExcess},
    syscall_filter,
};

const MEMORY_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// For programs that are idle most of the time.
const CONNECTED_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The shell's code for a program that could not be started, and its offset for signals.
const NOT_STARTED: i32 = 127;
const SIGNAL_CODE_BASE: i32 = 128;
/// The exit code if the sandbox ended the program; stderr has the reason.
const SANDBOX_FAILED: i32 = 125;

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
        let killed = self.prepare_group(limits)?;
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
            memory_interval: MEMORY_CHECK_INTERVAL,
        };
        let how = talk.poll_until_end(limits, began, holder);
        let wall = began.elapsed();
        kill_namespace(first)?;
        let mut ended = talk.into_result(how?, wall)?;
        ended.how = self.correct_end(ended.how, killed)?;
        Ok(ended)
    }

    /// Runs a program whose stdin and stdout are the holder's pipes and whose stderr is that of the
    /// cell. Returns the exit code of the cell. Ends this process if the holder is gone.
    pub(crate) fn run_connected(
        &self,
        program: SandboxProgram,
        limits: &ProgramLimits,
        holder: &HolderPipes,
    ) -> io::Result<i32> {
        let killed = self.prepare_group(limits)?;
        let (stdin, stdout) = holder.program_ends()?;
        let stderr = PipeWriter::from(io::stderr().as_fd().try_clone_to_owned()?);
        let (reports, report) = pipe()?;
        let job = CellJob::Program(program);
        let order = ProgramStart { job: &job, limits, cores: self.cores, filter: &self.filter };
        let first = match fork_into(PROGRAM_NAMESPACES)? {
            ForkSide::Parent(first) => first,
            ForkSide::Child => {
                init::run_init(&order, ProgramPipes { stdin, stdout, stderr, report })
            }
        };
        drop((stdin, stdout, stderr, report));
        let mut talk = ProgramIo {
            input: None,
            output: OutputPipe::closed(),
            errors: OutputPipe::closed(),
            report: OutputPipe::new(reports),
            output_max: usize::MAX,
            memory_interval: CONNECTED_CHECK_INTERVAL,
        };
        let began = Instant::now();
        let how = talk.poll_until_end(limits, began, &holder.requests);
        kill_namespace(first)?;
        let ended = how.and_then(|how| talk.into_result(how, began.elapsed()));
        let how = ended.and_then(|ended| self.correct_end(ended.how, killed));
        Ok(report_connected_end(how, limits))
    }

    /// Sets the limits of the group, if there is one. Returns the number of processes that were
    /// killed in it for lack of memory.
    fn prepare_group(&self, limits: &ProgramLimits) -> io::Result<Option<u64>> {
        let killed = self.group.as_ref().map(CgroupFiles::oom_kill_count).transpose()?;
        if let Some(group) = &self.group {
            group.set_limits(limits)?;
        }
        Ok(killed)
    }

    /// Recognises a program of which the kernel killed a process for lack of memory.
    fn correct_end(&self, how: ProgramEnd, killed: Option<u64>) -> io::Result<ProgramEnd> {
        let by_kernel = self.group.as_ref().map(CgroupFiles::oom_kill_count).transpose()? > killed;
        match how {
            ProgramEnd::Exited(_) | ProgramEnd::Signalled(_) if by_kernel => {
                Ok(ProgramEnd::OutOfMemory)
            }
            how => Ok(how),
        }
    }
}

/// Returns the exit code, and writes to stderr what it does not show.
fn report_connected_end(how: io::Result<ProgramEnd>, limits: &ProgramLimits) -> i32 {
    let (code, problem) = match how {
        Ok(ProgramEnd::Exited(code)) => (code, None),
        Ok(ProgramEnd::Signalled(signal)) => (SIGNAL_CODE_BASE + signal, None),
        Ok(ProgramEnd::NotStarted(why)) => (
            NOT_STARTED,
            Some(format!(
                "it cannot be started in the sandbox: {why}; if the agent runs as root, its file \
                 and directory must be readable by all users"
            )),
        ),
        Ok(ProgramEnd::OutOfMemory) => (
            SANDBOX_FAILED,
            Some(format!("it used more than {} MiB of memory", limits.memory_bytes >> 20)),
        ),
        Ok(end @ (ProgramEnd::TimedOut | ProgramEnd::OutputTooLong)) => {
            (SANDBOX_FAILED, Some(format!("the sandbox ended it: {end:?}")))
        }
        Err(error) => (SANDBOX_FAILED, Some(format!("the sandbox failed: {error}"))),
    };
    if let Some(problem) = problem {
        // The holder may be gone.
        let _ = writeln!(io::stderr(), "{problem}");
    }
    code
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

    fn closed() -> Self {
        Self { reader: None, bytes: Vec::new() }
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
    /// Between two measurements of the program's memory.
    memory_interval: Duration,
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
        let mut next_look = began + self.memory_interval;
        while self.report.reader.is_some() && !self.report.bytes.ends_with(b"\n") {
            let now = Instant::now();
            let left = limits.wall.saturating_sub(now - began);
            if left.is_zero() {
                return Ok(Some(ProgramEnd::TimedOut));
            }
            if now >= next_look {
                next_look = now + self.memory_interval;
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
