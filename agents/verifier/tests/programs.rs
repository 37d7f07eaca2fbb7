//! Programs and commands that judge, in a real sandbox with this host's own tools.

#[path = "programs/adapters.rs"]
mod adapters;
#[path = "programs/command.rs"]
mod command;
#[path = "programs/environment.rs"]
mod environment;
#[path = "programs/humaneval.rs"]
mod humaneval;
#[path = "programs/native.rs"]
mod native;
#[path = "programs/python.rs"]
mod python;
#[path = "programs/rig.rs"]
mod rig;
#[path = "programs/served.rs"]
mod served;
