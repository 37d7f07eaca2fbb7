"""Prints whatever of the box it can read; the canary must not be in it."""
import glob
import os

places = [os.environ["CANARY"], "/etc/shadow", "/etc/ssh", "/root", "/home", "/run", "/var/lib", "/sys"]
places += glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/root/**")
places += [f"/proc/{pid}/root" + os.environ["CANARY"] for pid in (1, 2, "self", os.getppid())]
places += ["/proc/self/cwd/../../.." + os.environ["CANARY"]]
for place in places:
    try:
        print(place, os.listdir(place) if os.path.isdir(place) else open(place, errors="replace").read())
    except OSError as error:
        print(place, error.errno)
