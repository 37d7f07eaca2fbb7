//! The tools of a host that verifiers use, detected once.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use sandbox::{CellLaunch, PathVisibility, Sandbox};

use crate::{
    grants::{CommandPlacement, OwnerGrants},
    host_process,
    tools::{ToolNeed, VerifierTools},
};

/// For the program that tests whether directories can be hidden.
const MASK_TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// The tools, the sandbox and the permissions that a host judges with.
#[derive(Debug, Clone)]
pub struct Toolchain {
    pub tools: VerifierTools,
    pub cell_launch: CellLaunch,
    /// Starts an uncontained command: calls [`sandbox::run_masked`] and takes `--hidden PATH` for
    /// each path, then `--` and the command line.
    pub masked_launch: CellLaunch,
    /// The agent's own files, which no program may see.
    pub hidden: Vec<PathBuf>,
    /// Given by the host's owner to commands.
    pub grants: OwnerGrants,
    pub contains: bool,
}

/// The result of testing what a host can do.
#[derive(Debug, Clone)]
pub struct ToolchainTest {
    /// A description of the sandbox, or the reason why programs cannot be contained.
    pub contained: Result<String, String>,
    /// The reason why the agent's directories cannot be hidden from uncontained commands; the
    /// allowed commands then do not run.
    pub unmasked: Option<String>,
}

impl Toolchain {
    pub(crate) fn without_programs() -> Self {
        let launch = || CellLaunch { program: PathBuf::new(), arguments: Vec::new() };
        Self {
            tools: VerifierTools::default(),
            cell_launch: launch(),
            masked_launch: launch(),
            hidden: Vec::new(),
            grants: OwnerGrants::default(),
            contains: false,
        }
    }

    /// Tests the sandbox and the masks. Removes the tools if the host has no sandbox, and the
    /// allowed commands if the agent's directories cannot be hidden from them.
    pub fn test_host(mut self) -> (Self, ToolchainTest) {
        let policy = PathVisibility {
            read_only: self.tools.sandbox_directories(),
            hidden: self.hidden.clone(),
        };
        let contained = match Sandbox::open(self.cell_launch.clone(), policy) {
            Ok(sandbox) => Ok(sandbox.active_layers().to_string()),
            Err(unfit) => {
                self.tools = VerifierTools::default();
                Err(unfit.to_string())
            }
        };
        self.contains = contained.is_ok();
        let unmasked = self.test_masks().err();
        if unmasked.is_some() {
            self.grants.commands.clear();
        }
        (self, ToolchainTest { contained, unmasked })
    }

    fn test_masks(&self) -> Result<(), String> {
        if self.grants.commands.is_empty() {
            return Ok(());
        }
        let argv = self.masked_command_line(["/bin/sh", "-c", ":"].map(OsString::from));
        host_process::run_program(&argv, Vec::new(), MASK_TEST_TIMEOUT).map(|_| ())
    }

    /// Hides the agent's directories from the program.
    pub(crate) fn masked_command_line(
        &self,
        argv: impl IntoIterator<Item = OsString>,
    ) -> Vec<OsString> {
        let CellLaunch { program, arguments } = &self.masked_launch;
        let mut masked = vec![program.clone().into_os_string()];
        masked.extend(arguments.iter().cloned());
        for path in &self.hidden {
            masked.extend(["--hidden".into(), path.clone().into_os_string()]);
        }
        masked.push("--".into());
        masked.extend(argv);
        masked
    }

    /// Fails with what is missing.
    pub(crate) fn place_command(
        &self,
        program: &str,
        paths: &[String],
    ) -> Result<CommandPlacement, String> {
        self.grants.place_command(program, paths, &self.hidden, self.contains)
    }

    /// Returns unmet needs, each with advice.
    pub(crate) fn missing_needs<'a>(
        &self,
        needs: impl IntoIterator<Item = &'a ToolNeed>,
    ) -> Vec<(&'a ToolNeed, String)> {
        let lacking = |need: &'a ToolNeed| match need {
            ToolNeed::Command { program, paths } => {
                Some((need, self.place_command(program, paths).err()?))
            }
            _ => (!self.tools.meets_need(need)).then(|| (need, need.describe_missing())),
        };
        needs.into_iter().filter_map(lacking).collect()
    }

    /// Lists what not every host can do, as announced to other agents.
    pub(crate) fn list_abilities(&self) -> Vec<String> {
        let mut abilities: Vec<String> = self.tools.0.keys().cloned().collect();
        if self.contains {
            abilities.push("command".into());
            abilities.extend(self.grants.paths.iter().map(|it| format!("path:{}", it.display())));
        }
        let allowed = |path: &PathBuf| format!("command:{}", path.display());
        abilities.extend(self.grants.commands.iter().map(allowed));
        abilities
    }
}
