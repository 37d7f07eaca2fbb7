"""An abstract socket has no file that a view could lack."""
import os
import socket

with socket.socket(socket.AF_UNIX) as opened:
    try:
        opened.connect("\0" + os.environ["ABSTRACT"])
        print("ESCAPED: reached an abstract socket")
    except OSError:
        pass
