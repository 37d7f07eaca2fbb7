"""Prints all there is of environments."""
import glob
import os

allowed = {"PATH", "HOME", "LANG", "TMPDIR", "LC_CTYPE"}
given = {"CANARY", "PORT", "ABSTRACT", "BYSTANDER", "OUTSIDE"}
for name in set(os.environ) - allowed - given:
    print("ESCAPED: variable", name)
for path in ("/proc/1/environ", "/proc/1/cmdline", "/proc/1/mem", "/proc/1/maps", "/proc/1/fd/0"):
    try:
        if open(path, "rb").read(1) and path != "/proc/1/cmdline":
            print("ESCAPED: read", path)
    except OSError:
        pass
