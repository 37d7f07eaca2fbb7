// Calls of the kernel that no honest program needs. None may do anything.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <unistd.h>
static char buffer[256];
#define TRY(call) if ((call) >= 0) puts("ESCAPED: " #call)
int main(void) {
    TRY(unshare(CLONE_NEWUSER));
    TRY(unshare(CLONE_NEWNET));
    TRY(syscall(SYS_clone, CLONE_NEWUSER | 17, 0, 0, 0, 0) ?: (_exit(9), 0));
    TRY(syscall(SYS_clone, CLONE_NEWPID | 17, 0, 0, 0, 0) ?: (_exit(9), 0));
    TRY(setns(open("/proc/self/ns/net", O_RDONLY), 0));
    TRY(mount("none", "/room/tmp", "tmpfs", 0, ""));
    TRY(mount("/", "/room/tmp", "", MS_BIND, ""));
    TRY(mount("", "/usr", "", MS_REMOUNT | MS_BIND, ""));
    TRY(umount2("/proc", MNT_DETACH));
    TRY(chroot("/room"));
    TRY(syscall(SYS_pivot_root, "/room", "/room/tmp"));
    TRY(syscall(430 /* fsopen */, "tmpfs", 0));
    TRY(syscall(428 /* open_tree */, AT_FDCWD, "/usr", 1));
    TRY(syscall(SYS_bpf, 0, buffer, sizeof buffer));
    TRY(syscall(SYS_keyctl, 0, -3, 1));
    TRY(syscall(SYS_add_key, "user", "a", "b", 1, -3));
    TRY(syscall(SYS_perf_event_open, buffer, 0, -1, -1, 0));
    TRY(syscall(SYS_userfaultfd, 1));
    TRY(syscall(425 /* io_uring_setup */, 1, buffer));
    TRY(syscall(SYS_io_setup, 1, buffer));
    TRY(syscall(SYS_kexec_load, 0, 0, 0, 0));
    TRY(syscall(SYS_init_module, buffer, 1, ""));
    TRY(syscall(SYS_finit_module, 0, "", 0));
    TRY(syscall(SYS_delete_module, "x", 0));
    TRY(syscall(SYS_open_by_handle_at, AT_FDCWD, buffer, 0));
    TRY(syscall(SYS_name_to_handle_at, AT_FDCWD, "/usr", buffer, buffer, 0));
    TRY(syscall(SYS_mq_open, "/queue", O_CREAT | O_RDWR, 0600, 0));
    TRY(syscall(SYS_semget, 0, 1, 0600));
    TRY(syscall(SYS_msgget, 0, 0600));
    TRY(syscall(SYS_syslog, 10, 0, 0));
    TRY(syscall(SYS_reboot, 0, 0, 0, 0));
    TRY(syscall(SYS_swapon, "/room", 0));
    TRY(syscall(SYS_sethostname, "x", 1));
    TRY(syscall(SYS_settimeofday, buffer, 0));
    TRY(syscall(SYS_seccomp, 2, 0, &(int){0}));
    TRY(syscall(SYS_personality, 0xffffffff));
    TRY(syscall(SYS_kcmp, 1, 2, 0, 0, 0));
    TRY(ioctl(0, TIOCSTI, "x"));
    TRY(syscall(SYS_clone3, buffer, 88));
#ifdef __x86_64__
    // The same kernel by its other doors.
    TRY(syscall(0x40000000 | SYS_unshare, CLONE_NEWUSER));
    TRY(syscall(0x40000000 | SYS_socket, 2, 1, 0));
#endif
    puts("done");
    return 0;
}
