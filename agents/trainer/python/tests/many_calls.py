"""Answers each call on stdin as a worker of its own does, in a fork of this process, so that many
trainings import PyTorch once.

    python many_calls.py PROGRAM   # train.py
"""

import os
import sys

program = sys.argv[1]
sys.path.insert(0, os.path.dirname(program))

from flotilla_trainer import main  # noqa: E402

main.hide_unused_packages(is_quantized=False)

from flotilla_trainer import training  # noqa: E402, F401

for line in iter(sys.stdin.buffer.readline, b""):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.dup2(reader, 0)
        os._exit(main.main())
    os.close(reader)
    with os.fdopen(writer, "wb") as call:
        call.write(line)
        call.flush()
        # The end of its input would end the child.
        os.waitpid(child, 0)
