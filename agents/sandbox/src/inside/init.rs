//! The first process of a program's namespaces: it mounts the program's `/proc`, starts the
//! program, reaps its orphans and reports how it ended. When it ends, the kernel ends all processes
//! that are left.

use std::{
    collections::BTreeMap,
    io::{self, PipeReader, PipeWriter, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use rustix::{
    process::{DumpableBehavior, Pid, WaitOptions, set_dumpable_behavior, setsid, wait},
    stdio::{dup2_stderr, dup2_stdin, dup2_stdout},
};
use serde::{Deserialize, Serialize};

use crate::{
    ProgramEnd, ProgramLimits, SandboxProgram,
    syscalls::{ForkSide, fork_into},
};

use super::{WORK, confine, probe, syscall_filter, view};

const ENVIRONMENT: [(&str, &str); 4] = [
    ("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"),
    ("HOME", WORK),
    ("LANG", "C.UTF-8"),
    ("TMPDIR", "/room/tmp"),
];

pub(crate) enum CellJob {
    Program(SandboxProgram),
    /// Tests the containment with a file that must not be visible.
    Probe(PathBuf),
}

/// Sent once; only the first line counts.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum InitReport {
    Ended(ProgramEnd),
    Broken(String),
}

pub(crate) struct ProgramPipes {
    pub stdin: PipeReader,
    pub stdout: PipeWriter,
    pub stderr: PipeWriter,
    pub report: PipeWriter,
}

pub(crate) struct ProgramStart<'a> {
    pub job: &'a CellJob,
    pub limits: &'a ProgramLimits,
    pub cores: u64,
    pub filter: &'a syscall_filter::ProgramFilter,
}

pub(crate) fn run_init(order: &ProgramStart, ends: ProgramPipes) -> ! {
    let ProgramPipes { stdin, stdout, stderr, mut report } = ends;
    match start_program(order, (stdin, stdout, stderr), &mut report) {
        Ok(program) => send_report(&mut report, &wait_program(program)),
        Err(error) => send_report(&mut report, &InitReport::Broken(error.to_string())),
    }
    std::process::exit(0)
}

/// Sends the report. If the reader is gone, this process is about to end too.
fn send_report(report: &mut PipeWriter, what: &InitReport) {
    let mut line = serde_json::to_vec(what).unwrap_or_default();
    line.push(b'\n');
    let _ = report.write_all(&line);
}

type StandardStreams = (PipeReader, PipeWriter, PipeWriter);

fn start_program(
    order: &ProgramStart,
    streams: StandardStreams,
    report: &mut PipeWriter,
) -> io::Result<Pid> {
    view::mount_proc(Path::new("/proc"))?;
    // Programs must not inspect this process, whose descriptors include the cell's pipes.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    confine::drop_capabilities()?;
    match fork_into(0)? {
        ForkSide::Parent(program) => Ok(program),
        ForkSide::Child => {
            match become_program(order, streams) {
                Ok(StartFailure::NotStarted(why)) => {
                    send_report(report, &InitReport::Ended(ProgramEnd::NotStarted(why)));
                }
                Err(error) => send_report(report, &InitReport::Broken(error.to_string())),
            }
            std::process::exit(1)
        }
    }
}

enum StartFailure {
    NotStarted(String),
}

/// Returns only if the program could not be executed.
fn become_program(
    order: &ProgramStart,
    (stdin, stdout, stderr): StandardStreams,
) -> io::Result<StartFailure> {
    setsid()?;
    dup2_stdin(stdin)?;
    dup2_stdout(stdout)?;
    dup2_stderr(stderr)?;
    std::env::set_current_dir(WORK)?;
    confine::apply_limits(order.limits, order.cores)?;
    order.filter.install_filter()?;
    match order.job {
        CellJob::Program(program) => Ok(StartFailure::NotStarted(exec_program(program))),
        CellJob::Probe(canary) => match probe::run_probe(canary, order.limits)? {},
    }
}

/// Returns the reason if the program could not be executed.
fn exec_program(program: &SandboxProgram) -> String {
    let Some((name, arguments)) = program.argv.split_first() else {
        return "argv is empty".to_owned();
    };
    let mut environment = BTreeMap::from(ENVIRONMENT);
    environment.extend(program.env.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    let error = Command::new(name).args(arguments).env_clear().envs(environment).exec();
    format!("{name}: {error}")
}

/// Reaps all other processes meanwhile.
fn wait_program(program: Pid) -> InitReport {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == program => {
                if let Some(code) = status.exit_status() {
                    return InitReport::Ended(ProgramEnd::Exited(code));
                }
                if let Some(signal) = status.terminating_signal() {
                    return InitReport::Ended(ProgramEnd::Signalled(signal));
                }
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return InitReport::Broken(format!("wait for the program: {error}")),
        }
    }
}
