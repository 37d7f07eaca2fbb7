// Looks into other processes, and lets itself be led.
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
int main(void) {
    char here[8];
    struct iovec local = {here, 8}, remote = {(void *)&main, 8};
    if (ptrace(PTRACE_TRACEME, 0, 0, 0) == 0) puts("ESCAPED: traceme");
    for (pid_t pid = 1; pid < 4; pid++) {
        if (pid == getpid()) continue;
        if (ptrace(PTRACE_SEIZE, pid, 0, 0) == 0) puts("ESCAPED: seize");
        if (process_vm_readv(pid, &local, 1, &remote, 1, 0) > 0) puts("ESCAPED: readv");
        if (process_vm_writev(pid, &local, 1, &remote, 1, 0) > 0) puts("ESCAPED: writev");
        int fd = syscall(SYS_pidfd_open, pid, 0);
        if (fd >= 0 && syscall(438 /* pidfd_getfd */, fd, 0, 0) >= 0) puts("ESCAPED: getfd");
    }
    return 0;
}
