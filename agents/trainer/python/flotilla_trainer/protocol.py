"""The protocol with the agent: one JSON object per line.

Only this module writes to the original stdout. The output of libraries goes to stderr, which is
the log.
"""

import ctypes
import json
import os
import queue
import signal
import sys
import threading
import time

# Also the agent's limit: a longer line ends the connection.
LINE_BYTES_MAX = 16 * 1024 * 1024

# Far below the agent's silence timeout.
HEARTBEAT_INTERVAL_S = 2.0

PR_SET_PDEATHSIG = 1

# The agent sends one call at a time.
CALLS_WAITING_MAX = 4

END_POLL_S = 0.2


class Channel:
    """The pipes to the agent. Other code in this process can no longer write to them."""

    def __init__(self):
        self._out = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        self._lock = threading.Lock()
        self._in = os.fdopen(os.dup(0), "rb")
        # Other code cannot read from the agent either.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        self._calls, self._busy = queue.Queue(CALLS_WAITING_MAX), False
        threading.Thread(target=self._read_calls, daemon=True).start()

    def next_call(self):
        """Returns the next call as (number, request); None at the end of the input."""
        self._busy = False
        call = self._calls.get()
        self._busy = call is not None
        return call

    def _read_calls(self):
        """Ends this process when the agent closes the pipe during a call, because no answer can be
        sent."""
        for line in iter(lambda: self._in.readline(LINE_BYTES_MAX), b""):
            try:
                message = json.loads(line)
                self._calls.put((message["call"], message["request"]))
            except (ValueError, KeyError, TypeError) as error:
                print(f"ignored an invalid call: {error!r}", file=sys.stderr)
        self._calls.put(None)
        while not self._busy:
            time.sleep(END_POLL_S)
        os._exit(1)

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
    def __init__(self, channel, call):
        self._channel, self._call = channel, call

    def progress(self, value):
        self._channel.send(self._call, {"progress": value})

    def reply(self, value):
        self._channel.send(self._call, {"reply": value})

    def error(self, message):
        self._channel.send(self._call, {"error": message})


class Heartbeats:
    """Sends heartbeats during a phase of a call, at most until the phase's time limit."""

    def __init__(self):
        self._respond, self._until = None, 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def start_call(self, respond):
        self._respond = respond

    def end_call(self):
        self._until = 0.0

    def start_phase(self, limit_s):
        self._until = time.monotonic() + limit_s

    def _run(self):
        while True:
            time.sleep(HEARTBEAT_INTERVAL_S)
            if time.monotonic() < self._until:
                self._respond.progress("busy")


class Stop:
    """Stops on SIGTERM: after the next step is saved, or at once before the first step."""

    EXIT_CODE = 128 + signal.SIGTERM

    def __init__(self):
        self.requested = False
        self.training = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, _signal, _frame):
        self.requested = True
        if not self.training:
            os._exit(self.EXIT_CODE)


def die_with_parent():
    """Asks the kernel to end this process when the one that started it dies (Linux)."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        # On other systems, the end of the input ends the process.
        pass
