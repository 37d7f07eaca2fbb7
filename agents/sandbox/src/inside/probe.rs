//! The self-test: tries, from the place of a program, what programs must not be able to do.

use std::{
    convert::Infallible,
    fs::{self, File},
    io::{self, ErrorKind},
    net::UdpSocket,
    path::Path,
};

use rustix::process::{Resource, getrlimit};

use crate::{
    ProgramLimits,
    syscalls::{CELL_NAMESPACES, fork_into},
};

use super::identity::ID;

/// Printed if the probe could do none of it.
pub(crate) const CONTAINED: &str = "contained";

/// Prints what is not contained, or `CONTAINED`, and ends the process.
pub(crate) fn run_probe(canary: &Path, limits: &ProgramLimits) -> io::Result<Infallible> {
    let found = [
        ("it sees a file of the agent", File::open(canary).is_ok()),
        ("it can write to the system", !is_read_only(File::create("/usr/canary"))),
        ("it can write to the root", !is_read_only(File::create("/canary"))),
        ("it cannot write to its room", fs::write("probe", "").is_err()),
        ("it can open a network socket", !is_denied(UdpSocket::bind("127.0.0.1:0"))),
        ("it has a network", network_interfaces()? != ["lo"]),
        ("it can make namespaces", fork_into(CELL_NAMESPACES).is_ok()),
        ("it is another user than it should be", rustix::process::geteuid().as_raw() != ID),
        ("it sees processes of others", visible_processes()? != [1, 2]),
        ("it can look into its namespace's first process", fs::read("/proc/1/environ").is_ok()),
        ("its processes are not limited", !is_limited(Resource::Nproc, limits.processes.into())),
        ("its files are not limited", !is_limited(Resource::Fsize, limits.disk_bytes)),
        ("its memory is not limited", !is_limited(Resource::Data, limits.memory_bytes)),
        ("it has capabilities", !has_status_line("CapPrm:\t0000000000000000")?),
        ("it could gain privileges", !has_status_line("NoNewPrivs:\t1")?),
        ("its system calls are not filtered", !has_status_line("Seccomp:\t2")?),
    ];
    let found: Vec<&str> =
        found.into_iter().filter(|(_, bad)| *bad).map(|(what, _)| what).collect();
    let say = if found.is_empty() { CONTAINED.to_owned() } else { found.join(", ") };
    io::Write::write_all(&mut io::stdout(), say.as_bytes())?;
    std::process::exit(0)
}

fn is_read_only<T>(outcome: io::Result<T>) -> bool {
    outcome.is_err_and(|error| error.kind() == ErrorKind::ReadOnlyFilesystem)
}

fn is_denied<T>(outcome: io::Result<T>) -> bool {
    outcome.is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
}

fn network_interfaces() -> io::Result<Vec<String>> {
    let devices = fs::read_to_string("/proc/self/net/dev")?;
    let name = |line: &str| Some(line.split_once(':')?.0.trim().to_owned());
    Ok(devices.lines().filter_map(name).collect())
}

/// Returns sorted process ids.
fn visible_processes() -> io::Result<Vec<u32>> {
    let names =
        fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut pids: Vec<u32> = names.filter_map(|name| name.parse().ok()).collect();
    pids.sort_unstable();
    Ok(pids)
}

/// Allows twice the given value, which leaves room for the cell's own share.
fn is_limited(resource: Resource, given: u64) -> bool {
    let limit = getrlimit(resource);
    let near = |value: Option<u64>| value.is_some_and(|value| value <= given.saturating_mul(2));
    near(limit.current) && near(limit.maximum)
}

fn has_status_line(line: &str) -> io::Result<bool> {
    Ok(fs::read_to_string("/proc/self/status")?.lines().any(|found| found == line))
}
