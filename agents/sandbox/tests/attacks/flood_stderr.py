"""The same to the other stream, from a process of its own."""
import os

os.fork()
while True:
    os.write(2, b"x" * 65536)
