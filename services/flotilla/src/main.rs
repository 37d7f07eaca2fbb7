//! The `flotilla` program, which the crate `cli` implements.

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run_program()
}
