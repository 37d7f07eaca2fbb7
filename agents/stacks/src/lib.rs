//! Installed stacks of a box: each is a directory with the programs of llama.cpp, a Python
//! environment, or both. The link `current` names the one that agents start with, `previous` the
//! one before, so that a switch is one rename and a rollback another.
//!
//! - `stack_directory` installs, lists, switches and rolls back.
//! - `copy_files` copies a directory of programs.
//! - `torch_install` installs the known versions of torch.

mod copy_files;
mod stack_directory;
mod torch_install;

pub use stack_directory::{InstalledStack, MakeEnvironment, StackDirectory, StackPrograms};
pub use torch_install::install_torch;
