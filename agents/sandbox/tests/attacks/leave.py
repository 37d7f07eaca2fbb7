"""Leaves what the next room must not find."""
import os
import socket

for place in ("/room/work", "/tmp", "/dev/shm", "/var/tmp", "/room"):
    open(f"{place}/left", "w").write("left")
left = socket.socket(socket.AF_UNIX)
left.bind("\0left")
left.listen()
if os.fork() == 0:
    os.setsid()
    left.accept()
