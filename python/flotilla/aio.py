"""The client for asyncio: the names of `flotilla`, with `await` and `async for`."""

from flotilla._async.fleet import Fleet, connect
from flotilla._async.run import Run

__all__ = ["Fleet", "Run", "connect"]
