//! The kernel's signal to a child whose parent has ended, by `prctl(PR_SET_PDEATHSIG)`.

use std::{io, os::unix::process::CommandExt, process::Command};

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// Makes the kernel send `signal` to the child when the thread that starts it ends. That thread
/// must therefore outlive the child.
#[expect(unsafe_code, reason = "pre_exec is the only way to set a parent death signal")]
pub fn set_death_signal(command: &mut Command, signal: Signal) {
    let parent = getpid();
    // SAFETY: between fork and exec only two system calls are made; nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(signal))?;
            // The parent may have died before the signal was set.
            if getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
        });
    }
}

/// Makes the kernel send `signal` to this process when its parent ends. Exits with 1 if the parent
/// is already gone.
pub fn die_with_parent(signal: Signal) {
    let parent = getppid();
    // Every kernel that can run this program supports it.
    let _ = set_parent_process_death_signal(Some(signal));
    if getppid() != parent {
        std::process::exit(1);
    }
}
