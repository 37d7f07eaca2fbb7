"""Reads calls, runs them and sends an answer to each: one call, or the slices of one training."""

import functools
import gc
import resource
import sys
import traceback

from . import call as calls
from . import protocol
from .errors import Refused

PHASE_IMPORT_S = 1800.0


def main():
    channel = protocol.Channel()
    protocol.die_with_parent()
    # A core dump of a GPU process is as large as its memory and slows the host for minutes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stop, heartbeats = protocol.Stop(), protocol.Heartbeats()
    loaded = None
    while (message := channel.next_call()) is not None:
        number, request = message
        respond = protocol.Responder(channel, number)
        try:
            if isinstance(request, dict) and "probe" in request:
                respond.reply(_probe(request["probe"], respond))
                return 0
            call = calls.read(request)
            stopped, loaded = _train(call, respond, heartbeats, stop, loaded)
        except Refused as error:
            respond.error(str(error))
            return 0
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            respond.error(f"{type(error).__name__}: {error}")
            return 1
        respond.reply({"stopped_at": stopped})
        if stopped is not None or stop.requested:
            return protocol.Stop.EXIT_CODE
        if call.slice is None:
            return 0
    return 0


def _probe(request, respond):
    from . import probe

    if not isinstance(request, dict) or set(request) != {"device", "dtype"}:
        raise Refused("the probe call needs exactly the fields device and dtype")
    return probe.run(request["device"], request["dtype"], respond)


def hide_unused_packages(is_quantized):
    """Hides what transformers and PEFT import wherever it is installed: it would take seconds and a
    hundred megabytes."""
    for name in ("datasets",) if is_quantized else ("bitsandbytes", "datasets"):
        sys.modules.setdefault(name, None)


@functools.cache
def _import_training():
    """Imports PyTorch, which takes from seconds to minutes on a cold disk. Later calls must not freeze
    what an earlier slice left behind."""
    # What is imported stays, so that collections of garbage find none.
    gc.disable()
    try:
        from . import training
    finally:
        gc.freeze()
        gc.enable()
    return training


def _train(call, respond, heartbeats, stop, loaded):
    """Returns the step at which SIGTERM stopped the training, or None, and what the next slice of
    the training can use."""
    heartbeats.start_call(respond)
    heartbeats.start_phase(PHASE_IMPORT_S)
    lora = call.training.lora
    hide_unused_packages(lora is not None and lora.quantization != "NONE")
    training = _import_training()
    run = training.Training(call, respond, heartbeats, stop, loaded)
    try:
        return run.run(), run.loaded
    except training.Stopped as stopped:
        return stopped.step, None
    finally:
        heartbeats.end_call()
        stop.training = False
