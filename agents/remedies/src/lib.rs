//! Applies the doctor's fixes to a host, and takes them back.
//!
//! - `fix_command` shows the plan, asks, and applies; nothing is changed without a yes.
//! - `apply` makes the changes below a root directory and undoes them.
//! - `journal` is the file with what was changed and how it was before, written first.

mod apply;
mod fix_command;
mod journal;

pub use apply::{HostRoot, apply_fixes, undo_fixes};
pub use fix_command::{FixOptions, fix_box, undo_box};
pub use journal::{FixJournal, FixRecord, FixStep};
