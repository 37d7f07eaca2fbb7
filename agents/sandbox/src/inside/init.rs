//! The first process of a program's namespaces: makes the program's `/proc`, starts it, reaps
//! what it leaves and says how it ended. When it ends itself, the kernel ends all that is left.

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
    How, Limits, Program,
    kernel::{Fork, fork},
};

use super::{WORK, confine, filter, probe, view};

/// What a program gets of an environment, unless it is given its own.
const ENVIRONMENT: [(&str, &str); 4] = [
    ("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"),
    ("HOME", WORK),
    ("LANG", "C.UTF-8"),
    ("TMPDIR", "/room/tmp"),
];

/// What is to be done in a program's place.
pub(crate) enum Job {
    Program(Program),
    /// See what a program could: a file that it must not see is given.
    Probe(PathBuf),
}

/// What comes back, once: the first line counts.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    Ended(How),
    /// The sandbox failed.
    Broken(String),
}

/// The program's side of its pipes.
pub(crate) struct Ends {
    pub stdin: PipeReader,
    pub stdout: PipeWriter,
    pub stderr: PipeWriter,
    pub report: PipeWriter,
}

/// Everything that a program is started with.
pub(crate) struct Order<'a> {
    pub job: &'a Job,
    pub limits: &'a Limits,
    pub cores: u64,
    pub filter: &'a filter::Program,
}

/// Does all of it, in the first process of new namespaces.
pub(crate) fn run(order: &Order, ends: Ends) -> ! {
    let Ends { stdin, stdout, stderr, mut report } = ends;
    match start(order, (stdin, stdout, stderr), &mut report) {
        Ok(program) => say(&mut report, &await_end(program)),
        Err(error) => say(&mut report, &Report::Broken(error.to_string())),
    }
    std::process::exit(0)
}

/// Who would have read it is gone, and so will this process be.
fn say(report: &mut PipeWriter, what: &Report) {
    let mut line = serde_json::to_vec(what).unwrap_or_default();
    line.push(b'\n');
    let _ = report.write_all(&line);
}

type Streams = (PipeReader, PipeWriter, PipeWriter);

fn start(order: &Order, streams: Streams, report: &mut PipeWriter) -> io::Result<Pid> {
    view::mount_proc(Path::new("/proc"))?;
    // Nobody inside may look into this process, which could name the cell's pipes.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    confine::capabilities()?;
    match fork(0)? {
        Fork::Parent(program) => Ok(program),
        Fork::Child => {
            match become_program(order, streams) {
                Ok(Started::No(why)) => say(report, &Report::Ended(How::NotStarted(why))),
                Err(error) => say(report, &Report::Broken(error.to_string())),
            }
            std::process::exit(1)
        }
    }
}

/// What is left to say for a process that should have become another.
pub(crate) enum Started {
    No(String),
}

fn become_program(order: &Order, (stdin, stdout, stderr): Streams) -> io::Result<Started> {
    setsid()?;
    dup2_stdin(stdin)?;
    dup2_stdout(stdout)?;
    dup2_stderr(stderr)?;
    std::env::set_current_dir(WORK)?;
    confine::limits(order.limits, order.cores)?;
    order.filter.apply()?;
    match order.job {
        Job::Program(program) => Ok(Started::No(execute(program))),
        Job::Probe(canary) => probe::examine(canary, order.limits),
    }
}

/// Why it could not.
fn execute(program: &Program) -> String {
    let Some((name, arguments)) = program.argv.split_first() else {
        return "argv is empty".to_owned();
    };
    let mut environment = BTreeMap::from(ENVIRONMENT);
    environment.extend(program.env.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    let error = Command::new(name).args(arguments).env_clear().envs(environment).exec();
    format!("{name}: {error}")
}

fn await_end(program: Pid) -> Report {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == program => {
                if let Some(code) = status.exit_status() {
                    return Report::Ended(How::Exited(code));
                }
                if let Some(signal) = status.terminating_signal() {
                    return Report::Ended(How::Signalled(signal));
                }
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Report::Broken(format!("wait for the program: {error}")),
        }
    }
}
