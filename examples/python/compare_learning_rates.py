"""Trains with three learning rates at the same time, and compares their perplexities."""

import asyncio

from flotilla import aio


async def train(fleet: aio.Fleet, learning_rate: float) -> str:
    spec = {
        "name": "rates",
        "base": {"checkpoint": "base-1"},
        "evals": [{"name": "worked", "text": "worked.jsonl"}],
        "sft": {
            "data": "sft.jsonl",
            "training": {"epochs": 2, "batch_size": 32, "learning_rate": learning_rate},
            "lora": {"r": 8, "alpha": 16},
        },
    }
    run = await fleet.submit(spec)
    await run.wait()
    result = (await run.list_evals())[-1]
    return f"learning rate {learning_rate:g}: {result}"


async def main() -> None:
    async with aio.connect() as fleet:
        rates = (0.0005, 0.001, 0.002)
        print(*await asyncio.gather(*(train(fleet, rate) for rate in rates)), sep="\n")


asyncio.run(main())
