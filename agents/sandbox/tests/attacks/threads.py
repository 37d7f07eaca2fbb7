"""As many threads as there are to be had; says how many there were."""
import os
import threading
import time

count = 0
try:
    while count < 100_000:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        count += 1
except RuntimeError:
    pass
print("threads", count, flush=True)
os._exit(0)
