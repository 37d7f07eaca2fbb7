//! Opening a sandbox: a box shows that it contains programs, or is not used for them.

use std::{
    ffi::OsString,
    fmt, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use crate::{
    Broken, Cell, Ended, How, Layer, Limits, Policy, Program, Unfit, cell,
    cgroup::Parent,
    frame::{Reply, Request, Setup},
    inside::CONTAINED,
};

/// Of a program that never ends by itself, to see whether it is ended.
const TEST_WALL: Duration = Duration::from_millis(50);

/// In the environment of a cell, where programs must not find it.
const CANARY: &str = "FLOTILLA_CANARY";

/// Where a cell's own program may find its libraries.
const LIBRARIES: [&str; 1] = ["LD_LIBRARY_PATH"];

/// How to start a cell: a program that calls [`crate::serve_cell`], and its arguments.
#[derive(Debug, Clone)]
pub struct Launch {
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
}

/// What contains programs here. All but `cgroup` is in force wherever there is a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layers {
    /// Whether the kernel counts memory and processes, rather than limits of each process and
    /// looks at all of them.
    pub cgroup: bool,
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = if self.cgroup {
            "cgroup"
        } else {
            "no cgroup (memory is watched; delegate one to have it counted)"
        };
        write!(f, "namespaces, read-only view, seccomp, no capabilities, rlimits, {counted}")
    }
}

/// A box that can contain programs; having one is the proof.
#[derive(Debug, Clone)]
pub struct Sandbox(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    launch: Launch,
    policy: Policy,
    groups: Option<Parent>,
}

impl Sandbox {
    /// Contains a few probes and believes what they find.
    ///
    /// # Errors
    ///
    /// [`Unfit`] when this box lacks a layer, or a probe could do what it must not.
    pub fn open(launch: Launch, policy: Policy) -> Result<Self, Unfit> {
        check_kernel(&rustix::system::uname().release().to_string_lossy())?;
        let sandbox = Self(Arc::new(Inner { launch, policy, groups: Parent::find() }));
        let cell = sandbox.start()?;
        test(cell).map_err(|problem| Unfit::new(Layer::SelfTest, problem))?;
        Ok(sandbox)
    }

    /// What contains programs here.
    #[must_use]
    pub fn layers(&self) -> Layers {
        Layers { cgroup: self.0.groups.is_some() }
    }

    /// Starts a cell. It takes some milliseconds; keep it for many programs.
    ///
    /// # Errors
    ///
    /// When a cell cannot be had any more, though there was one before.
    pub fn cell(&self) -> Result<Cell, Broken> {
        self.start().map_err(|unfit| Broken(unfit.to_string()))
    }

    fn start(&self) -> Result<Cell, Unfit> {
        let lacking = |error: io::Error| Unfit::new(Layer::Cell, error);
        let Inner { launch, policy, groups } = &*self.0;
        let group = groups.as_ref().map(Parent::group).transpose().map_err(lacking)?;
        let path = group.as_ref().map(|group| group.path().to_owned());
        let child = Command::new(&launch.program)
            .args(&launch.arguments)
            .env_clear()
            .envs(LIBRARIES.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?))))
            .env(CANARY, "seen")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| {
                Unfit::new(Layer::Cell, format!("start {}: {error}", launch.program.display()))
            })?;
        let mut cell = Cell::hold(child, group).map_err(lacking)?;
        let setup = Request::Setup(Setup { policy: policy.clone(), group: path });
        match cell.ask(&setup, &[], Duration::ZERO) {
            Ok((Reply::Done, _)) => Ok(cell),
            Ok((Reply::Unfit { layer, problem, refused: true }, _)) => {
                Err(Unfit::refused(layer, problem))
            }
            Ok((Reply::Unfit { layer, problem, .. }, _)) => Err(Unfit::new(layer, problem)),
            Ok((reply, _)) => Err(Unfit::new(Layer::Cell, cell::unexpected(reply))),
            Err(Broken(problem)) => Err(Unfit::new(Layer::Cell, problem)),
        }
    }
}

/// Mounts are restricted with their submounts since 5.12; since 5.14 processes are counted for each
/// user namespace and not for a user of the whole box.
const KERNEL_MIN: (u32, u32) = (5, 14);

fn check_kernel(release: &str) -> Result<(), Unfit> {
    let mut numbers = release.split(['.', '-', '+']).map_while(|part| part.parse::<u32>().ok());
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) if (major, minor) >= KERNEL_MIN => Ok(()),
        _ => Err(Unfit::new(Layer::Kernel, format!("this is {release}"))),
    }
}

/// What the box fails to contain.
fn test(mut cell: Cell) -> Result<(), String> {
    let canary = tempfile::NamedTempFile::new().map_err(|error| format!("a canary: {error}"))?;
    let probed = probe(&mut cell, canary.path()).map_err(|broken| broken.to_string())?;
    let said = String::from_utf8_lossy(&probed.stdout);
    if probed.how != How::Exited(0) || said != CONTAINED {
        return Err(format!("{:?}: {said}{}", probed.how, String::from_utf8_lossy(&probed.stderr)));
    }
    let ended = shell(&mut cell, "export -p", Limits::default().wall)?;
    let environment = String::from_utf8_lossy(&ended.stdout);
    if ended.how != How::Exited(0) || !environment.contains("HOME") || environment.contains(CANARY)
    {
        return Err(format!("a shell ended {:?} with the environment {environment}", ended.how));
    }
    let ended = shell(&mut cell, "while :; do :; done", TEST_WALL)?;
    if ended.how != How::TimedOut {
        return Err(format!("a program that never ends ended {:?}", ended.how));
    }
    Ok(())
}

fn probe(cell: &mut Cell, canary: &Path) -> Result<Ended, Broken> {
    cell.room::<&str, &[u8]>(&[])?;
    let limits = Limits::default();
    let request = Request::Probe { canary: canary.to_owned(), limits: limits.clone() };
    cell.run(&request, &[], limits.wall)
}

fn shell(cell: &mut Cell, script: &str, wall: Duration) -> Result<Ended, String> {
    let argv = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    let program = Program { argv, ..Program::default() };
    let mut room = cell.room::<&str, &[u8]>(&[]).map_err(|broken| broken.to_string())?;
    let limits = Limits { wall, ..Limits::default() };
    room.run(&program, &limits).map_err(|broken| broken.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_before_5_14_and_unknown_ones_are_refused() {
        for fit in ["5.14.0", "6.8.0-45-generic", "6.18.44+", "7.0-rc1"] {
            assert_eq!(check_kernel(fit), Ok(()), "{fit}");
        }
        for unfit in ["5.13.19", "5.4.0-200-generic", "4.18.0-553.el8", "plan 9", ""] {
            assert_eq!(check_kernel(unfit).unwrap_err().layer, Layer::Kernel, "{unfit}");
        }
    }
}
