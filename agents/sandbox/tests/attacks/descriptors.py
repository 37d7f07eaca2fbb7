"""Forges its own report on whatever it might have inherited, then fails."""
import os
import sys

print("open", sorted(int(fd) for fd in os.listdir("/proc/self/fd")))
for fd in range(3, 1024):
    try:
        os.write(fd, b'{"Ended":{"Exited":0}}\n')
        print("ESCAPED: wrote to", fd)
    except OSError:
        pass
try:
    for fd in os.listdir("/proc/1/fd"):
        print("ESCAPED: descriptor", fd, "of the first process")
except OSError:
    pass
sys.exit(3)
