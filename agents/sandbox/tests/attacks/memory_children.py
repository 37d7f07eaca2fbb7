"""Many processes that want a little each."""
import os
import time

for _ in range(32):
    if os.fork() == 0:
        kept = bytearray(b"x" * (32 << 20))
        time.sleep(60)
time.sleep(60)
