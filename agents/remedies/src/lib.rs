//! Applies the doctor's fixes to a host, and undoes them.
//!
//! - `fix_command` shows the plan, asks, and applies; nothing changes without consent.
//! - `apply` makes the changes below a root directory and undoes them.
//! - `journal` is the file that records each change and the state before it, written first.

mod apply;
mod fix_command;
mod journal;

pub use apply::{HostRoot, apply_fixes, undo_fixes};
pub use fix_command::{FixOptions, fix_box, undo_box};
pub use journal::{FixJournal, FixRecord, FixStep};
