// The 32-bit door of a 64-bit kernel: socketcall(socket, AF_INET).
#include <stdio.h>
int main(void) {
#ifdef __x86_64__
    int id;
    __asm__ volatile("int $0x80" : "=a"(id) : "a"(20) : "memory"); // getpid
    if (id > 0) puts("ESCAPED: int 0x80");
#endif
    return 0;
}
