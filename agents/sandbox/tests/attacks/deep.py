"""A tree that is too deep for those who clean up by walking."""
import os

try:
    for _ in range(20_000):
        os.mkdir("d")
        os.chdir("d")
except OSError:
    pass
