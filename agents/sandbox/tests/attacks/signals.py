"""Ends everybody it can name."""
import os
import signal

victims = [int(os.environ["BYSTANDER"]), os.getppid(), 1, 0, *range(3, 3000)]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for victim in victims:
    for number in (signal.SIGTERM, signal.SIGSTOP if victim else signal.SIGTERM, signal.SIGKILL if victim else 0):
        try:
            os.kill(victim, number)
        except OSError:
            pass
try:
    os.kill(-1, signal.SIGKILL)
    print("ESCAPED: there was somebody else")
except ProcessLookupError:
    pass
