//! Contains programs that a model wrote.
//!
//! A [`Sandbox`] is a box that has shown it can contain programs. Its [`Cell`]s are processes
//! that have given up everything outside once, so that each program costs two forks and a mount
//! rather than a container. A [`Room`] is a fresh work directory in a cell, in which programs
//! run one after another; whatever a program started ends with it.
//!
//! What is contained, by which layers and what is not: `docs/SANDBOX.md`. This crate knows
//! neither languages nor verdicts.

mod cell;
mod cgroup;
mod frame;
mod inside;
mod kernel;
mod program;
mod sandbox;
mod unfit;

pub use cell::{Broken, Cell, Room};
pub use inside::{WORK, serve_cell};
pub use program::{Ended, How, Limits, Policy, Program};
pub use sandbox::{Launch, Layers, Sandbox};
pub use unfit::{Layer, Unfit};
