"""Runs one operation of the Python client on the fleet of FLOTILLA_DIR, and prints JSON lines.

    run_client.py submit SPEC
    run_client.py wait RUN
    run_client.py agents
    run_client.py download RUN DIRECTORY
    run_client.py evals RUN AFTER COUNT sync|async    (the results after a cursor)
"""

import asyncio
import itertools
import json
import sys
from typing import Any

import flotilla
from flotilla import EvalResult, aio


def show(record: Any) -> None:
    print(json.dumps(record), flush=True)


def show_eval(result: EvalResult) -> None:
    show({"cursor": result.cursor, "step": result.step, "perplexity": result.perplexity})


def watch_evals(run: str, after: int, count: int) -> None:
    with flotilla.connect() as fleet:
        for result in itertools.islice(fleet.watch_evals(run, after=after), count):
            show_eval(result)


async def watch_evals_async(run: str, after: int, count: int) -> None:
    async with aio.connect() as fleet:
        async for result in fleet.watch_evals(run, after=after):
            show_eval(result)
            count -= 1
            if count == 0:
                return


def main(command: str, *arguments: str) -> None:
    if command == "evals":
        run, after, count, kind = arguments
        if kind == "async":
            asyncio.run(watch_evals_async(run, int(after), int(count)))
        else:
            watch_evals(run, int(after), int(count))
        return
    with flotilla.connect() as fleet:
        if command == "submit":
            show(fleet.submit(arguments[0]).id)
        elif command == "wait":
            info = fleet.run(arguments[0]).wait()
            show({"state": info.state, "sampled": [it.sampled for it in info.message.cycles_done]})
        elif command == "agents":
            show([agent.agent for agent in fleet.list_agents()])
        elif command == "download":
            fleet.run(arguments[0]).download_checkpoint(arguments[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
