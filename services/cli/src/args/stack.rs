//! Arguments of `flotilla stack`.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use stacks::{InstalledStack, StackDirectory};

use super::BurnInArgs;

/// The subcommands of `flotilla stack`.
#[derive(Debug, Subcommand)]
pub(crate) enum StackCommand {
    /// List the installed stacks of this box.
    List(StackPlaceArgs),
    /// Install a stack, without using it.
    Install(StackInstallArgs),
    /// Run a burn-in with a stack, and let agents start with it if it passes.
    Use(StackUseArgs),
    /// Let agents start with the previous stack again.
    RollBack {
        /// Roll back only if this stack is in use
        #[arg(long, value_name = "NAME")]
        from: Option<String>,
        #[command(flatten)]
        place: StackPlaceArgs,
    },
}

/// The directory of stacks.
#[derive(Debug, Args)]
pub(crate) struct StackPlaceArgs {
    /// Directory of installed stacks [default: ~/.flotilla/stacks]
    #[arg(long, value_name = "DIR", env = "FLOTILLA_STACKS")]
    pub stacks: Option<PathBuf>,
}

impl StackPlaceArgs {
    /// Returns the directory, which need not exist; `None` if it is not named and there is no home.
    pub(crate) fn find_directory(&self) -> anyhow::Result<Option<StackDirectory>> {
        let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
        let default = home.map(|home| Path::new(&home).join(".flotilla/stacks"));
        let path = self.stacks.clone().or(default);
        Ok(path.map(std::path::absolute).transpose()?.map(StackDirectory::new))
    }

    /// Returns the stack that agents start with, if any.
    pub(crate) fn current_stack(&self) -> anyhow::Result<Option<InstalledStack>> {
        let stacks = self.find_directory()?;
        Ok(stacks.map(|stacks| stacks.current_stack()).transpose()?.flatten())
    }
}

/// Arguments of `flotilla stack install`.
#[derive(Debug, Args)]
pub(crate) struct StackInstallArgs {
    /// Name of the stack, such as a date or a version
    pub name: String,
    /// Copy the llama.cpp programs of this directory
    #[arg(long, value_name = "DIR")]
    pub llama_cpp: Option<PathBuf>,
    /// Python environment to use in place: VENV/bin/python
    #[arg(long, value_name = "PATH", conflicts_with = "torch")]
    pub python: Option<PathBuf>,
    /// Install the PyTorch that is known to work on this card, with uv
    #[arg(long)]
    pub torch: bool,
    /// Hardware profile to use instead of the detected one: a name or a file
    #[arg(long)]
    pub profile: Option<String>,
    #[command(flatten)]
    pub place: StackPlaceArgs,
}

/// Arguments of `flotilla stack use`.
#[derive(Debug, Args)]
pub(crate) struct StackUseArgs {
    /// Name of the stack
    pub name: String,
    /// Use it without a burn-in
    #[arg(long)]
    pub untested: bool,
    /// Run only the burn-in, for example as the user of the agent
    #[arg(long, conflicts_with = "untested")]
    pub only_test: bool,
    #[command(flatten)]
    pub place: StackPlaceArgs,
    #[command(flatten)]
    pub burn_in: BurnInArgs,
}
