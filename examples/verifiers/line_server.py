"""The loop of a verifier that keeps running (`command: { argv, serve: true }`).

Each line of stdin is a completion with all fields of its prompt, each line of stdout its verdict;
both have the same `id`: see docs/VERIFIERS.md, "Programs that keep running". Import this module
before others: what they print goes to stderr, because only verdicts may go to stdout.
"""
import asyncio
import inspect
import json
import os
import sys
import traceback

_stdout = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)


def write_line(value):
    """Writes one line of JSON to stdout."""
    _stdout.write(json.dumps(value, allow_nan=False).encode() + b"\n")
    _stdout.flush()


def serve(judge):
    """Answers each line with what `judge(sample)` returns: a dict with `outcome`, and if wanted
    `reward` and `detail`. An exception becomes the outcome `error`, which is no failure of the
    sample. If `judge` is a coroutine function, samples are judged concurrently."""
    if inspect.iscoroutinefunction(judge):
        asyncio.run(_serve_concurrently(judge))
        return
    for line in sys.stdin.buffer:
        sample = json.loads(line)
        try:
            write_line({**judge(sample), "id": sample["id"]})
        except Exception as error:
            _write_error(sample, error)


async def _serve_concurrently(judge):
    async def judge_line(line):
        sample = json.loads(line)
        try:
            write_line({**await judge(sample), "id": sample["id"]})
        except Exception as error:
            _write_error(sample, error)

    running = set()
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        running.add(task := asyncio.create_task(judge_line(line)))
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)


def _write_error(sample, error):
    traceback.print_exception(error)
    detail = f"{type(error).__name__}: {error}"
    write_line({"outcome": "error", "detail": detail, "id": sample["id"]})
