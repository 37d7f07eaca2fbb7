//! Child processes: start them in a group of their own, end them with their parent, bound what they
//! print, terminate them before they are killed. Knows nothing of what the programs do.

mod death_signal;
mod output;
mod owned_child;
mod signals;

pub use death_signal::{die_with_parent, set_death_signal};
pub use output::{OutputTail, ProgramOutput, RunError, RunLimits, run_program};
pub use owned_child::{OwnedChild, spawn_owned};
pub use signals::{ChildPid, terminate_child};
