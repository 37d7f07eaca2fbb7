//! What tests need of a machine. A test that lacks something is recorded as skipped, because test
//! runners count it as passed. `skipped-tests` lists the records at the end of a run.

mod find;
mod skips;

pub use find::{find_program, require_program, require_root};
pub use skips::{AllowedSkips, SkippedTest, clear_skipped_tests, read_skipped_tests, skip_test};
