//! Arguments of `flotilla stack`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

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
    #[command(flatten)]
    pub place: StackPlaceArgs,
    #[command(flatten)]
    pub burn_in: BurnInArgs,
}
