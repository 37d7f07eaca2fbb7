"""Reads one call, runs it and sends one answer."""

import resource
import sys
import traceback

from . import call as calls
from . import protocol
from .errors import Refused


def main():
    channel = protocol.Channel()
    protocol.die_with_parent()
    # A core dump of a GPU process is as large as its memory and slows the host for minutes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stop = protocol.Stop()
    message = channel.next_call()
    if message is None:
        return 0
    number, request = message
    respond = protocol.Responder(channel, number)
    channel.end_with_agent()
    try:
        if isinstance(request, dict) and "probe" in request:
            respond.reply(_probe(request["probe"], respond))
            return 0
        stopped = _train(request, respond, stop)
    except Refused as error:
        respond.error(str(error))
        return 0
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        respond.error(f"{type(error).__name__}: {error}")
        return 1
    respond.reply({"stopped_at": stopped})
    return 0 if stopped is None else protocol.Stop.EXIT_CODE


def _probe(request, respond):
    from . import probe

    if not isinstance(request, dict) or set(request) != {"device", "dtype"}:
        raise Refused("the probe call needs exactly the fields device and dtype")
    return probe.run(request["device"], request["dtype"], respond)


def _train(request, respond, stop):
    call = calls.read(request)
    heartbeats = protocol.Heartbeats(respond)
    heartbeats.start_phase(PHASE_IMPORT_S)
    # Importing takes from seconds to minutes on a cold disk.
    from . import training

    try:
        return training.Training(call, respond, heartbeats, stop).run()
    except training.Stopped as stopped:
        return stopped.step


PHASE_IMPORT_S = 1800.0
