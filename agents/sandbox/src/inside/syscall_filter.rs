//! The system call filter, in two steps because installing a filter takes time: a cell installs,
//! once, the list of calls that programs and the cell itself need; each program then removes the
//! calls that only the cell needs and those with forbidden arguments.
//!
//! A forbidden call fails with an error and does not kill the process, because many programs try a
//! call and continue without it.

use std::{collections::BTreeMap, ffi::c_long, io};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Length, SeccompCmpOp as Is, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch, apply_filter,
};

/// The calls that programs may use, some only with certain arguments. All others appear as not
/// implemented: tracing and reading other processes, keys, BPF, performance counters, io_uring and
/// AIO, namespaces and mounts, modules, memory outside file systems (memfd) or that outlives its
/// processes (System V), clocks, clone3 (a filter cannot inspect its flags), and all calls of later
/// kernels.
#[rustfmt::skip]
const ALLOWED_CALLS: &[c_long] = &[
    libc::SYS_accept, libc::SYS_accept4, libc::SYS_bind, libc::SYS_brk, libc::SYS_capget,
    libc::SYS_capset, libc::SYS_chdir, libc::SYS_clock_getres, libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep, libc::SYS_clone, libc::SYS_close, libc::SYS_close_range,
    libc::SYS_connect, libc::SYS_copy_file_range, libc::SYS_dup, libc::SYS_dup3,
    libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2, libc::SYS_execve, libc::SYS_execveat, libc::SYS_exit,
    libc::SYS_exit_group, libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_fadvise64,
    libc::SYS_fallocate, libc::SYS_fchdir, libc::SYS_fchmod, libc::SYS_fchmodat, libc::SYS_fchown,
    libc::SYS_fchownat, libc::SYS_fcntl, libc::SYS_fdatasync, libc::SYS_fgetxattr,
    libc::SYS_flistxattr, libc::SYS_flock, libc::SYS_fremovexattr, libc::SYS_fsetxattr,
    libc::SYS_fstat, libc::SYS_fstatfs, libc::SYS_fsync, libc::SYS_ftruncate, libc::SYS_futex,
    libc::SYS_futex_waitv, libc::SYS_get_mempolicy, libc::SYS_get_robust_list, libc::SYS_getcpu,
    libc::SYS_getcwd, libc::SYS_getdents64, libc::SYS_getegid, libc::SYS_geteuid,
    libc::SYS_getgid, libc::SYS_getgroups, libc::SYS_getitimer, libc::SYS_getpeername,
    libc::SYS_getpgid, libc::SYS_getpid, libc::SYS_getppid, libc::SYS_getpriority,
    libc::SYS_getrandom, libc::SYS_getresgid, libc::SYS_getresuid, libc::SYS_getrusage,
    libc::SYS_getsid, libc::SYS_getsockname, libc::SYS_getsockopt, libc::SYS_gettid,
    libc::SYS_gettimeofday, libc::SYS_getuid, libc::SYS_getxattr, libc::SYS_inotify_add_watch,
    libc::SYS_inotify_init1, libc::SYS_inotify_rm_watch, libc::SYS_ioctl, libc::SYS_ioprio_get,
    libc::SYS_ioprio_set, libc::SYS_kill, libc::SYS_lgetxattr, libc::SYS_linkat, libc::SYS_listen,
    libc::SYS_listxattr, libc::SYS_llistxattr, libc::SYS_lremovexattr, libc::SYS_lseek,
    libc::SYS_lsetxattr, libc::SYS_madvise, libc::SYS_membarrier, libc::SYS_mincore,
    libc::SYS_mkdirat, libc::SYS_mknodat, libc::SYS_mlock, libc::SYS_mlock2, libc::SYS_mlockall,
    libc::SYS_mmap, libc::SYS_mprotect, libc::SYS_mremap, libc::SYS_mseal, libc::SYS_msync,
    libc::SYS_munlock, libc::SYS_munlockall, libc::SYS_munmap, libc::SYS_nanosleep,
    libc::SYS_newfstatat, libc::SYS_openat, libc::SYS_openat2, libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal, libc::SYS_pipe2, libc::SYS_pkey_alloc, libc::SYS_pkey_free,
    libc::SYS_pkey_mprotect, libc::SYS_ppoll, libc::SYS_prctl, libc::SYS_pread64,
    libc::SYS_preadv, libc::SYS_preadv2, libc::SYS_prlimit64, libc::SYS_pselect6,
    libc::SYS_pwrite64, libc::SYS_pwritev, libc::SYS_pwritev2, libc::SYS_read,
    libc::SYS_readahead, libc::SYS_readlinkat, libc::SYS_readv, libc::SYS_recvfrom,
    libc::SYS_recvmmsg, libc::SYS_recvmsg, libc::SYS_removexattr, libc::SYS_renameat2,
    libc::SYS_restart_syscall, libc::SYS_rseq, libc::SYS_rt_sigaction, libc::SYS_rt_sigpending,
    libc::SYS_rt_sigprocmask, libc::SYS_rt_sigqueueinfo, libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend, libc::SYS_rt_sigtimedwait, libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_sched_get_priority_max, libc::SYS_sched_get_priority_min,
    libc::SYS_sched_getaffinity, libc::SYS_sched_getattr, libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler, libc::SYS_sched_rr_get_interval, libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr, libc::SYS_sched_setparam, libc::SYS_sched_setscheduler,
    libc::SYS_sched_yield, libc::SYS_sendfile, libc::SYS_sendmmsg, libc::SYS_sendmsg,
    libc::SYS_sendto, libc::SYS_set_robust_list, libc::SYS_set_tid_address, libc::SYS_setfsgid,
    libc::SYS_setfsuid, libc::SYS_setgid, libc::SYS_setgroups, libc::SYS_setitimer,
    libc::SYS_setpgid, libc::SYS_setpriority, libc::SYS_setregid, libc::SYS_setresgid,
    libc::SYS_setresuid, libc::SYS_setreuid, libc::SYS_setsid, libc::SYS_setsockopt,
    libc::SYS_setuid, libc::SYS_setxattr, libc::SYS_shutdown, libc::SYS_sigaltstack,
    libc::SYS_signalfd4, libc::SYS_socket, libc::SYS_socketpair, libc::SYS_splice,
    libc::SYS_statfs, libc::SYS_statx, libc::SYS_symlinkat, libc::SYS_syncfs, libc::SYS_sysinfo,
    libc::SYS_tee, libc::SYS_tgkill, libc::SYS_timer_create, libc::SYS_timer_delete,
    libc::SYS_timer_getoverrun, libc::SYS_timer_gettime, libc::SYS_timer_settime,
    libc::SYS_timerfd_create, libc::SYS_timerfd_gettime, libc::SYS_timerfd_settime,
    libc::SYS_times, libc::SYS_tkill, libc::SYS_truncate, libc::SYS_umask, libc::SYS_uname,
    libc::SYS_unlinkat, libc::SYS_utimensat, libc::SYS_wait4, libc::SYS_waitid, libc::SYS_write,
    libc::SYS_writev,];

/// The same calls under their older names.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const ALLOWED_OLD: &[c_long] = &[
    libc::SYS_access, libc::SYS_alarm, libc::SYS_arch_prctl, libc::SYS_chmod, libc::SYS_chown,
    libc::SYS_creat, libc::SYS_dup2, libc::SYS_epoll_create, libc::SYS_epoll_wait,
    libc::SYS_eventfd, libc::SYS_fchmodat2, libc::SYS_fork, libc::SYS_futimesat,
    libc::SYS_getdents, libc::SYS_getpgrp, libc::SYS_getrlimit, libc::SYS_inotify_init,
    libc::SYS_lchown, libc::SYS_link, libc::SYS_lstat, libc::SYS_mkdir, libc::SYS_mknod,
    libc::SYS_open, libc::SYS_pause, libc::SYS_pipe, libc::SYS_poll, libc::SYS_readlink,
    libc::SYS_rename, libc::SYS_renameat, libc::SYS_rmdir, libc::SYS_select, libc::SYS_setrlimit,
    libc::SYS_signalfd, libc::SYS_stat, libc::SYS_symlink, libc::SYS_sync_file_range,
    libc::SYS_time, libc::SYS_unlink, libc::SYS_utime, libc::SYS_utimes, libc::SYS_vfork,];

#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_OLD: &[c_long] = &[];

const CELL_ONLY_CALLS: &[c_long] = &[libc::SYS_mount, libc::SYS_umount2, libc::SYS_seccomp];

/// Requests that inject input into a terminal.
const TERMINAL_REQUESTS: [u64; 2] = [TIOCSTI, TIOCLINUX];
/// From asm-generic/ioctls.h; the type of the constant differs between C libraries.
const TIOCSTI: u64 = 0x5412;
const TIOCLINUX: u64 = 0x541C;

const NEW_NAMESPACES: [libc::c_int; 8] = [
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWCGROUP,
    // For clone this bit is part of the signal number; it is refused as well.
    libc::CLONE_NEWTIME,
];

pub(crate) struct ProgramFilter(BpfProgram);

impl ProgramFilter {
    /// Applies to this process and its children.
    pub(crate) fn install_filter(&self) -> io::Result<()> {
        apply_filter(&self.0).map_err(io::Error::other)
    }
}

/// Installs the filter of the first step for this process and its children.
pub(crate) fn apply_cell_filter() -> io::Result<()> {
    let calls = [ALLOWED_CALLS, ALLOWED_OLD, CELL_ONLY_CALLS].concat();
    let rules = calls.into_iter().map(|call| (call, Vec::new())).collect();
    let refused = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    let filter = compile_filter(rules, refused, SeccompAction::Allow)?;
    apply_filter(&filter).map_err(io::Error::other)
}

/// Compiles the filter of the second step.
pub(crate) fn compile_program_filter() -> io::Result<ProgramFilter> {
    let mut rules: BTreeMap<_, _> =
        CELL_ONLY_CALLS.iter().map(|call| (*call, Vec::new())).collect();
    let unix = u64::from(libc::AF_UNIX.cast_unsigned());
    rules.insert(libc::SYS_socket, vec![argument_rule(0, Is::Ne, unix)?]);
    rules.insert(libc::SYS_socketpair, vec![argument_rule(0, Is::Ne, unix)?]);
    let spaces = NEW_NAMESPACES.map(|flag| u64::from(flag.cast_unsigned()));
    let spaces: Result<_, _> =
        spaces.into_iter().map(|flag| argument_rule(0, Is::MaskedEq(flag), flag)).collect();
    rules.insert(libc::SYS_clone, spaces?);
    let requests: Result<_, _> =
        TERMINAL_REQUESTS.into_iter().map(|request| argument_rule(1, Is::Eq, request)).collect();
    rules.insert(libc::SYS_ioctl, requests?);
    // Only for this process itself.
    rules.insert(libc::SYS_prlimit64, vec![argument_rule(0, Is::Ne, 0)?]);
    let refused = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    Ok(ProgramFilter(compile_filter(rules, SeccompAction::Allow, refused)?))
}

/// Compares the lower 32 bits of an argument; the kernel reads no more of these.
fn argument_rule(argument: u8, is: Is, value: u64) -> io::Result<SeccompRule> {
    SeccompCondition::new(argument, Length::Dword, is, value)
        .and_then(|condition| SeccompRule::new(vec![condition]))
        .map_err(io::Error::other)
}

fn compile_filter(
    rules: BTreeMap<c_long, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    listed: SeccompAction,
) -> io::Result<BpfProgram> {
    let machine = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
    SeccompFilter::new(rules, otherwise, listed, machine)
        .and_then(BpfProgram::try_from)
        .map_err(io::Error::other)
}
