"""Tries to be somebody else."""
import os
import shutil
import subprocess

for become in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0]), lambda: os.setgid(0)):
    try:
        become()
        print("ESCAPED: became", os.getuid(), os.getgid())
    except OSError:
        pass
shutil.copy("/usr/bin/id", "mine")
os.chmod("mine", 0o6755)
for argv in (["./mine", "-u"], ["/usr/bin/su", "-c", "id -u"], ["/usr/bin/sudo", "-n", "id", "-u"], ["/usr/bin/newuidmap", str(os.getpid()), "0", "0", "1"]):
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5)
        if done.stdout.strip() == "0":
            print("ESCAPED: root by", argv)
    except (OSError, subprocess.TimeoutExpired):
        pass
