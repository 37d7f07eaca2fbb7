//! The system calls that neither std nor rustix provides. All unsafe code of this crate is in this
//! file and in `inside/masked.rs`.

use std::{
    ffi::{CString, c_int},
    io,
    os::{
        fd::{AsFd, AsRawFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::process::Pid;

/// The side of a [`fork_into`] on which the code continues.
pub(crate) enum ForkSide {
    Parent(Pid),
    Child,
}

/// All created together with the cell's process.
pub(crate) const CELL_NAMESPACES: c_int = libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

/// For an uncontained program from which directories are hidden.
pub(crate) const MASKED_NAMESPACES: c_int =
    libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNS;

pub(crate) const PROGRAM_NAMESPACES: c_int = libc::CLONE_NEWPID | libc::CLONE_NEWNS;

/// Copies this process into new namespaces. Only for single-threaded processes, whose copies may
/// continue with any operation.
#[expect(unsafe_code, reason = "no library has fork with namespaces")]
pub(crate) fn fork_into(namespaces: c_int) -> io::Result<ForkSide> {
    let flags = libc::c_ulong::from((namespaces | libc::SIGCHLD).cast_unsigned());
    let zero: libc::c_ulong = 0;
    // SAFETY: without a stack and without CLONE_VM this is fork(2); the process has one thread, so
    // no lock is held by a thread that the child lacks.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, zero, zero, zero, zero) };
    match i32::try_from(pid) {
        Ok(0) => Ok(ForkSide::Child),
        Ok(pid) if pid > 0 => Pid::from_raw(pid)
            .map(ForkSide::Parent)
            .ok_or_else(|| io::Error::other("clone returned no process")),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Keeps the standard three descriptors; the process that started the agent may have left others
/// open. Must be called before this process opens any.
#[expect(unsafe_code, reason = "nothing else closes what this process does not know of")]
pub(crate) fn close_inherited_files() -> io::Result<()> {
    // SAFETY: nothing in this process owns a descriptor above the standard ones yet.
    let outcome = unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Adds attributes (`MOUNT_ATTR_*`) to the mount at `path` below `at`, or at `at` itself if `path`
/// is empty, and to all mounts below it.
#[expect(unsafe_code, reason = "rustix has no mount_setattr")]
pub(crate) fn restrict_mounts(at: impl AsFd, path: &Path, attributes: u64) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let attributes =
        libc::mount_attr { attr_set: attributes, attr_clr: 0, propagation: 0, userns_fd: 0 };
    let flags = libc::AT_EMPTY_PATH | libc::AT_RECURSIVE;
    // SAFETY: the pointers refer to values that live until the call returns, and the size is that
    // of the struct.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            at.as_fd().as_raw_fd(),
            path.as_ptr(),
            flags,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
