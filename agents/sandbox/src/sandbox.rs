//! Opening a sandbox: a host proves that it contains programs before any is run.

use std::{
    ffi::OsString,
    fmt, io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use crate::{
    ConnectedProgram, PathVisibility, ProgramEnd, ProgramLimits, ProgramResult, SandboxCell,
    SandboxError, SandboxLayer, SandboxProgram, UnfitHost, cell,
    cgroup::CgroupParent,
    inside::CONTAINED,
    protocol::{CellReply, CellRequest, CellSetup},
};

/// For a test program that never ends by itself.
const TEST_WALL: Duration = Duration::from_millis(50);

/// In the environment of a cell; programs must not see it.
const CANARY_VARIABLE: &str = "FLOTILLA_CANARY";

/// A cell's own program finds its libraries with them.
const LIBRARY_VARIABLES: [&str; 1] = ["LD_LIBRARY_PATH"];

/// The program that starts a cell by calling [`crate::serve_cell`], and its arguments.
#[derive(Debug, Clone)]
pub struct CellLaunch {
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
}

/// The use of a cell: programs one after another, or one that is connected to the holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CellUse {
    Requests,
    OneProgram,
}

/// The layers that contain programs on this host. All except `cgroup` are active in every sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SandboxLayers {
    /// True if the kernel counts memory and processes; false if limits of each process and periodic
    /// measurements do.
    pub cgroup: bool,
}

impl fmt::Display for SandboxLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = if self.cgroup {
            "cgroup"
        } else {
            "no cgroup (memory is watched; delegate one to have it counted)"
        };
        write!(f, "namespaces, read-only view, seccomp, no capabilities, rlimits, {counted}")
    }
}

/// A host that can contain programs; a value of this type is the proof.
///
/// ```text
/// let sandbox = Sandbox::open(launch, visibility)?;     // runs the self-test
/// let mut cell = sandbox.start_cell()?;                 // some milliseconds, reusable
/// let mut room = cell.create_room(&[("main.py", code)])?;
/// let result = room.run(&program, &limits)?;
/// ```
#[derive(Debug, Clone)]
pub struct Sandbox(Arc<SandboxInner>);

#[derive(Debug)]
struct SandboxInner {
    launch: CellLaunch,
    policy: PathVisibility,
    groups: Option<CgroupParent>,
}

impl Sandbox {
    /// Opens a sandbox and tests it. Fails if the host lacks a layer, or a probe could do something
    /// forbidden.
    pub fn open(launch: CellLaunch, policy: PathVisibility) -> Result<Self, UnfitHost> {
        check_kernel_release(&rustix::system::uname().release().to_string_lossy())?;
        let sandbox =
            Self(Arc::new(SandboxInner { launch, policy, groups: CgroupParent::find_delegated() }));
        let cell = sandbox.try_start_cell(CellUse::Requests)?;
        run_self_test(cell).map_err(|problem| UnfitHost::new(SandboxLayer::SelfTest, problem))?;
        Ok(sandbox)
    }

    /// Returns a sandbox that shows these paths too, read-only. It is not tested again.
    #[must_use]
    pub fn with_read_only(&self, more: &[PathBuf]) -> Self {
        let SandboxInner { launch, policy, groups } = &*self.0;
        let mut policy = policy.clone();
        policy.read_only.extend_from_slice(more);
        Self(Arc::new(SandboxInner { launch: launch.clone(), policy, groups: groups.clone() }))
    }

    /// Returns the layers that are active on this host.
    #[must_use]
    pub fn active_layers(&self) -> SandboxLayers {
        SandboxLayers { cgroup: self.0.groups.is_some() }
    }

    /// Starts a cell in some milliseconds; reuse it for many programs.
    pub fn start_cell(&self) -> Result<SandboxCell, SandboxError> {
        self.try_start_cell(CellUse::Requests).map_err(|unfit| SandboxError(unfit.to_string()))
    }

    /// Starts a program that talks to its holder through pipes until one of them ends, in a new
    /// cell with an empty room. The limits of time and output do not apply to it; its stdin is not
    /// read from `program`.
    pub fn connect_program(
        &self,
        program: &SandboxProgram,
        limits: &ProgramLimits,
    ) -> Result<ConnectedProgram, SandboxError> {
        let cell = self.try_start_cell(CellUse::OneProgram);
        let mut cell = cell.map_err(|unfit| SandboxError(unfit.to_string()))?;
        cell.create_room::<&str, &[u8]>(&[])?;
        cell.connect_program(program, limits)
    }

    fn try_start_cell(&self, cell_use: CellUse) -> Result<SandboxCell, UnfitHost> {
        let lacking = |error: io::Error| UnfitHost::new(SandboxLayer::Cell, error);
        let SandboxInner { launch, policy, groups } = &*self.0;
        let group = groups.as_ref().map(CgroupParent::create_group).transpose().map_err(lacking)?;
        let path = group.as_ref().map(|group| group.group_path().to_owned());
        let mut command = Command::new(&launch.program);
        if cell_use == CellUse::OneProgram {
            command.stderr(Stdio::piped()).process_group(0);
        }
        let child = command
            .args(&launch.arguments)
            .env_clear()
            .envs(
                LIBRARY_VARIABLES
                    .into_iter()
                    .filter_map(|name| Some((name, std::env::var_os(name)?))),
            )
            .env(CANARY_VARIABLE, "seen")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| {
                UnfitHost::new(
                    SandboxLayer::Cell,
                    format!("start {}: {error}", launch.program.display()),
                )
            })?;
        let mut cell = SandboxCell::from_child(child, group).map_err(lacking)?;
        let setup = CellRequest::Setup(CellSetup { policy: policy.clone(), group: path });
        match cell.send_request(&setup, &[], Duration::ZERO) {
            Ok((CellReply::Done, _)) => Ok(cell),
            Ok((CellReply::Unfit { layer, problem, refused: true }, _)) => {
                Err(UnfitHost::refused_by_kernel(layer, problem))
            }
            Ok((CellReply::Unfit { layer, problem, .. }, _)) => Err(UnfitHost::new(layer, problem)),
            Ok((reply, _)) => Err(UnfitHost::new(SandboxLayer::Cell, cell::reply_error(reply))),
            Err(SandboxError(problem)) => Err(UnfitHost::new(SandboxLayer::Cell, problem)),
        }
    }
}

/// 5.12 introduced recursive mount attributes, and 5.14 counts processes per user namespace instead
/// of per user of the host.
const KERNEL_MIN: (u32, u32) = (5, 14);

fn check_kernel_release(release: &str) -> Result<(), UnfitHost> {
    let mut numbers = release.split(['.', '-', '+']).map_while(|part| part.parse::<u32>().ok());
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) if (major, minor) >= KERNEL_MIN => Ok(()),
        _ => Err(UnfitHost::new(SandboxLayer::Kernel, format!("this is {release}"))),
    }
}

/// Fails with what the host does not contain.
fn run_self_test(mut cell: SandboxCell) -> Result<(), String> {
    let canary = tempfile::NamedTempFile::new().map_err(|error| format!("a canary: {error}"))?;
    let probed = run_probe(&mut cell, canary.path()).map_err(|broken| broken.to_string())?;
    let output = String::from_utf8_lossy(&probed.stdout);
    if probed.how != ProgramEnd::Exited(0) || output != CONTAINED {
        return Err(format!(
            "{:?}: {output}{}",
            probed.how,
            String::from_utf8_lossy(&probed.stderr)
        ));
    }
    let ended = run_shell(&mut cell, "export -p", ProgramLimits::default().wall)?;
    let environment = String::from_utf8_lossy(&ended.stdout);
    if ended.how != ProgramEnd::Exited(0)
        || !environment.contains("HOME")
        || environment.contains(CANARY_VARIABLE)
    {
        return Err(format!("a shell ended {:?} with the environment {environment}", ended.how));
    }
    let ended = run_shell(&mut cell, "while :; do :; done", TEST_WALL)?;
    if ended.how != ProgramEnd::TimedOut {
        return Err(format!("a program that never ends ended {:?}", ended.how));
    }
    Ok(())
}

fn run_probe(cell: &mut SandboxCell, canary: &Path) -> Result<ProgramResult, SandboxError> {
    cell.create_room::<&str, &[u8]>(&[])?;
    let limits = ProgramLimits::default();
    let request = CellRequest::Probe { canary: canary.to_owned(), limits: limits.clone() };
    cell.run_request(&request, &[], limits.wall)
}

fn run_shell(
    cell: &mut SandboxCell,
    script: &str,
    wall: Duration,
) -> Result<ProgramResult, String> {
    let argv = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    let program = SandboxProgram { argv, ..SandboxProgram::default() };
    let mut room = cell.create_room::<&str, &[u8]>(&[]).map_err(|broken| broken.to_string())?;
    let limits = ProgramLimits { wall, ..ProgramLimits::default() };
    room.run(&program, &limits).map_err(|broken| broken.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_before_5_14_and_unknown_ones_are_refused() {
        for fit in ["5.14.0", "6.8.0-45-generic", "6.18.44+", "7.0-rc1"] {
            assert_eq!(check_kernel_release(fit), Ok(()), "{fit}");
        }
        for unfit in ["5.13.19", "5.4.0-200-generic", "4.18.0-553.el8", "plan 9", ""] {
            assert_eq!(
                check_kernel_release(unfit).unwrap_err().layer,
                SandboxLayer::Kernel,
                "{unfit}"
            );
        }
    }
}
