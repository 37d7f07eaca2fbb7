//! The `flotilla` program, which the crate `cli` implements.

use mimalloc::MiMalloc;
use std::process::ExitCode;

/// Keeps freed memory for a while. Engines allocate large tensors again and again; with the
/// allocators of glibc and musl each costs page faults, and unmapping it interrupts every core.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    cli::run_program()
}
