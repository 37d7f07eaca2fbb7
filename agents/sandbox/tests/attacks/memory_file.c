// Memory as a file of no file system.
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
int main(void) {
    if (memfd_create("hidden", 0) >= 0) puts("ESCAPED: memfd_create");
    if (shmget(IPC_PRIVATE, 1 << 20, IPC_CREAT | 0600) >= 0) puts("ESCAPED: shmget");
    return 0;
}
