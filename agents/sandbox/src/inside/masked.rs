//! Programs that the host's owner allowed to run uncontained: they see the host and its network,
//! but neither the hidden directories nor other processes.
//!
//! Masks are mounts in a mount namespace. The user namespace around it makes them permanent: its
//! only user is an ordinary one without capabilities, which can neither unmount anything nor
//! inspect a process outside, even of the same user. If the agent is root, that user is `nobody`.

use std::{
    ffi::OsString,
    fs,
    io::{self, ErrorKind, Read, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use rustix::{
    mount::{MountPropagationFlags, mount_change},
    process::{
        Pid, Signal, WaitOptions, WaitStatus, getegid, geteuid, kill_process, wait, waitpid,
    },
    thread::{UnshareFlags, unshare_unsafe},
};

use crate::syscalls::{ForkSide, MASKED_NAMESPACES, close_inherited_files, fork_into};

use super::{confine, identity, view};

/// The exit code of [`run_masked`] if a path could not be hidden: the program was not started.
pub const MASKING_FAILED: i32 = 125;

/// The shell's code for a program that could not be started.
const NOT_STARTED: i32 = 127;

/// The shell's offset, added to the number of the signal that ended the program.
const SIGNAL_CODE_BASE: i32 = 128;

/// The sockets of the user's services, which could start programs outside.
const USER_SERVICES: &str = "/run/user";

/// Runs a program with these paths hidden from it and its children, and exits with the program's
/// code. Nothing that it started outlives it. Must be called while the process has one thread and
/// has opened no files. Errors are written to stderr.
pub fn run_masked(hidden: &[PathBuf], argv: &[OsString]) -> ! {
    let code = start_masked(hidden, argv).unwrap_or_else(|error| {
        eprintln!("could not hide the agent's files: {error}");
        MASKING_FAILED
    });
    std::process::exit(code)
}

/// Makes paths absolute, and existing ones canonical. Removes those below another one of the list,
/// which are hidden with it.
#[must_use]
pub fn find_outermost(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    let resolve =
        |path: PathBuf| path.canonicalize().or_else(|_| std::path::absolute(&path)).unwrap_or(path);
    let mut paths: Vec<PathBuf> = paths.into_iter().map(resolve).collect();
    // A directory sorts before the paths below it.
    paths.sort();
    let mut outermost: Vec<PathBuf> = Vec::new();
    for path in paths {
        if !outermost.iter().any(|above| path.starts_with(above)) {
            outermost.push(path);
        }
    }
    outermost
}

/// Hides paths from this process and its children, unless they are root and undo it. Must be called
/// while the process has one thread. Fails if this user may not create namespaces.
#[expect(unsafe_code, reason = "rustix says what may go wrong with other flags than these")]
pub fn hide_from_this_process(hidden: &[PathBuf]) -> io::Result<()> {
    let hidden = find_existing(hidden)?;
    let (user, group) = (geteuid(), getegid());
    let is_root = user.is_root();
    let flags =
        if is_root { UnshareFlags::NEWNS } else { UnshareFlags::NEWUSER | UnshareFlags::NEWNS };
    // SAFETY: unsharing a file descriptor table would be unsafe; these flags are namespaces.
    unsafe { unshare_unsafe(flags) }?;
    if !is_root {
        let (user, group) = (user.as_raw(), group.as_raw());
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("{user} {user} 1\n"))?;
        fs::write("/proc/self/gid_map", format!("{group} {group} 1\n"))?;
    }
    mask_paths(&hidden)
}

/// Returns the existing paths, with true for each directory. Fails for a path that cannot be
/// inspected, because it cannot be hidden.
fn find_existing(hidden: &[PathBuf]) -> io::Result<Vec<(PathBuf, bool)>> {
    let mut found = Vec::new();
    for path in find_outermost(hidden.to_vec()) {
        match fs::metadata(&path) {
            Ok(what) => found.push((path, what.is_dir())),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(with_path(&path, &error)),
        }
    }
    Ok(found)
}

fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Covers the paths in this process's mount namespace.
fn mask_paths(hidden: &[(PathBuf, bool)]) -> io::Result<()> {
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    for (path, directory) in hidden {
        view::mask_path(path, *directory).map_err(|error| with_path(path, &error))?;
    }
    Ok(())
}

fn start_masked(hidden: &[PathBuf], argv: &[OsString]) -> io::Result<i32> {
    close_inherited_files()?;
    let mut hidden = find_existing(hidden)?;
    if Path::new(USER_SERVICES).is_dir() {
        hidden.push((USER_SERVICES.into(), true));
    }
    let who = identity::OutsideIdentity::choose_identity()?;
    let (mut mapped, mut map) = io::pipe()?;
    match fork_into(MASKED_NAMESPACES)? {
        ForkSide::Parent(inner) => {
            drop(mapped);
            // User and group ids are the same inside and outside.
            let written =
                who.write_maps(inner, (who.user, who.group)).and_then(|()| map.write_all(&[1]));
            if let Err(error) = written {
                // The process may have ended already.
                let _ = kill_process(inner, Signal::KILL);
                return Err(error);
            }
            let ended = waitpid(Some(inner), WaitOptions::empty())?;
            Ok(ended.map_or(MASKING_FAILED, |(_, status)| exit_code(status)))
        }
        ForkSide::Child => {
            drop(map);
            // The pipe is closed without a byte if the identity could not be mapped.
            mapped.read_exact(&mut [0])?;
            drop(mapped);
            wait_program(confine_masked(&hidden, who).and_then(|()| launch_program(argv))?)
        }
    }
}

/// Drops all privileges that could undo the masks. Fails if a hidden path is still visible.
fn confine_masked(hidden: &[(PathBuf, bool)], who: identity::OutsideIdentity) -> io::Result<()> {
    mask_paths(hidden)?;
    view::mount_proc(Path::new("/proc"))?;
    // A working directory below a mask would give access to the covered files.
    std::env::set_current_dir("/")?;
    identity::become_user(who.user, who.group)?;
    confine::forbid_privileges()?;
    confine::drop_capabilities()?;
    match hidden.iter().find(|(path, directory)| is_visible(path, *directory)) {
        Some((path, _)) => Err(io::Error::other(format!("{} is still visible", path.display()))),
        None => Ok(()),
    }
}

fn is_visible(path: &Path, directory: bool) -> bool {
    if directory {
        fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some())
    } else {
        fs::read(path).is_ok_and(|content| !content.is_empty())
    }
}

fn launch_program(argv: &[OsString]) -> io::Result<Pid> {
    let (program, arguments) =
        argv.split_first().ok_or_else(|| io::Error::other("argv is empty"))?;
    match fork_into(0)? {
        ForkSide::Parent(program) => Ok(program),
        ForkSide::Child => {
            let error = Command::new(program).args(arguments).exec();
            eprintln!("start {}: {error}", program.display());
            std::process::exit(NOT_STARTED)
        }
    }
}

/// Reaps orphans meanwhile.
fn wait_program(program: Pid) -> io::Result<i32> {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == program => return Ok(exit_code(status)),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns the code that a shell would.
fn exit_code(status: WaitStatus) -> i32 {
    let signalled = status.terminating_signal().map(|signal| SIGNAL_CODE_BASE + signal);
    status.exit_status().or(signalled).unwrap_or(MASKING_FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_outermost_of_paths_is_kept() {
        let paths =
            ["/no/credentials/agents/a", "/no/credentials", "/no/kitchen", "/no/credentials"]
                .map(PathBuf::from);
        let found = find_outermost(paths.to_vec());
        assert_eq!(found, ["/no/credentials", "/no/kitchen"].map(PathBuf::from));
    }
}
