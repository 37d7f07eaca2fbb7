//! Contains programs that a model wrote.
//!
//! A [`Sandbox`] is proof that the host can contain programs. Its [`SandboxCell`]s are processes
//! that have given up access to the host once, so that each program costs two forks and a mount
//! instead of a container. A [`SandboxRoom`] is a new work directory in a cell, in which programs
//! run one after another; every process that a program started ends with it. A
//! [`ConnectedProgram`] has a cell of its own and talks to its holder until it ends.
//!
//! A program that the host's owner allowed to run outside a cell is started by [`run_masked`],
//! which hides directories and other processes from it.
//!
//! `docs/SANDBOX.md` describes what is contained, by which layers, and what is not. This crate
//! knows neither languages nor verdicts.

mod cell;
mod cgroup;
mod inside;
mod program;
mod protocol;
mod sandbox;
mod syscalls;
mod unfit_host;

pub use cell::{ConnectedGuard, ConnectedProgram, SandboxCell, SandboxError, SandboxRoom};
pub use inside::{
    MASKING_FAILED, WORK, find_outermost, hide_from_this_process, run_masked, serve_cell,
};
pub use program::{PathVisibility, ProgramEnd, ProgramLimits, ProgramResult, SandboxProgram};
pub use sandbox::{CellLaunch, Sandbox, SandboxLayers};
pub use unfit_host::{SandboxLayer, UnfitHost};
