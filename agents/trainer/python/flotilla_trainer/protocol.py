"""How this process talks with its agent: one JSON object a line.

The pipe that was stdout is kept here alone. Whatever a library prints goes to stderr, which is
the log.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time

# As the agent's side has it: a longer line ends the conversation.
LINE_BYTES_MAX = 16 * 1024 * 1024

# Between two signs of life; well below what the agent bears of silence.
SIGN_EVERY_S = 2.0

PR_SET_PDEATHSIG = 1


class Channel:
    """The agent's end of the pipes, taken from whoever else may write to stdout."""

    def __init__(self):
        self._out = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        self._lock = threading.Lock()
        self._in = os.fdopen(os.dup(0), "rb")
        # Nobody else reads the agent's words either.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def next_call(self):
        """The next call as (number, request); None when there will be none."""
        for line in iter(lambda: self._in.readline(LINE_BYTES_MAX), b""):
            try:
                message = json.loads(line)
                return message["call"], message["request"]
            except (ValueError, KeyError, TypeError) as error:
                print(f"a line that is no call: {error!r}", file=sys.stderr)
        return None

    def end_with_agent(self):
        """Ends this process when the agent's pipe closes: nobody would hear the answer."""

        def wait():
            while self._in.read(4096):
                pass
            os._exit(1)

        threading.Thread(target=wait, daemon=True).start()

    def send(self, call, answer):
        line = json.dumps({"call": call, **answer}, allow_nan=False).encode() + b"\n"
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._out, line) :]
            except OSError:
                # The agent is gone.
                os._exit(1)


class Responder:
    """Where one call's answers go."""

    def __init__(self, channel, call):
        self._channel, self._call = channel, call

    def progress(self, value):
        self._channel.send(self._call, {"progress": value})

    def reply(self, value):
        self._channel.send(self._call, {"reply": value})

    def error(self, message):
        self._channel.send(self._call, {"error": message})


class SignsOfLife:
    """Tells the agent that this is no hang, for as long as the phase may last."""

    def __init__(self, respond):
        self._respond, self._until = respond, 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def phase(self, limit_s):
        self._until = time.monotonic() + limit_s

    def _run(self):
        while True:
            time.sleep(SIGN_EVERY_S)
            if time.monotonic() < self._until:
                self._respond.progress("busy")


class Stop:
    """SIGTERM: at the next step's end, after it is saved. Before there is a step, at once."""

    EXIT_CODE = 128 + signal.SIGTERM

    def __init__(self):
        self.asked = False
        self.training = False
        signal.signal(signal.SIGTERM, self._told)

    def _told(self, _signal, _frame):
        self.asked = True
        if not self.training:
            os._exit(self.EXIT_CODE)


def die_with_parent():
    """Asks the kernel to end this process when the one that started it dies (Linux)."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        # Elsewhere the closed pipe says so.
        pass
