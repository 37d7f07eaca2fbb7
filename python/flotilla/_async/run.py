"""A run of a fleet."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal

from flotilla._async.transport import Transport
from flotilla.errors import RunFailedError
from flotilla.progress import Progress, ProgressDisplay
from flotilla.records import EvalResult, RunInfo, Sample
from flotilla.v1 import board_pb2, control_pb2

_WHICH = {
    "train": board_pb2.SamplesRequest.TRAIN_SAMPLES,
    "heldout": board_pb2.SamplesRequest.HELDOUT_SAMPLES,
}


class Run:
    """A run, by its id. Every method can raise RpcError, such as NotFoundError."""

    def __init__(self, transport: Transport, run_id: str) -> None:
        self._transport = transport
        self.id = run_id

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    async def get_info(self) -> RunInfo:
        """Returns its state, with cycles, checkpoints and evals in `message`."""
        request = control_pb2.GetRunRequest(run=self.id)
        run = await self._transport.call("Runs/Get", request, control_pb2.Run)
        return RunInfo.from_message(run)

    async def pause(self, reason: str = "") -> None:
        """Stops new work. Samples and checkpoints wait. Raises StateError if it has ended."""
        await self._control("Pause", reason)

    async def resume(self, reason: str = "") -> None:
        """Continues after a pause. Raises StateError if it has ended."""
        await self._control("Resume", reason)

    async def cancel(self, reason: str = "") -> None:
        """Ends it for good. Raises StateError if it has ended."""
        await self._control("Cancel", reason)

    async def _control(self, action: str, reason: str) -> None:
        request = control_pb2.ControlRequest(run=self.id, reason=reason)
        await self._transport.call(f"Runs/{action}", request, control_pb2.ControlResponse)

    async def fork(
        self, cycle: int, settings: Mapping[str, Any] | None = None, *, name: str = ""
    ) -> Run:
        """Starts a run that takes over the cycles to `cycle` and continues with other settings.

        A setting is a key of the spec and its value: {"training.learning_rate": 1e-4}.
        """
        pairs = [f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()]
        request = control_pb2.ForkRequest(run=self.id, cycle=cycle, settings=pairs, name=name)
        answer = await self._transport.call("Runs/Fork", request, control_pb2.ForkResponse)
        return Run(self._transport, answer.run)

    async def watch(self) -> AsyncIterator[board_pb2.Board]:
        """Yields the whole progress, then changes, at most ten per second, until the run ends.

        Each cycle in a message replaces its previous state. After a loss of the connection, the
        whole progress comes again.
        """
        request = control_pb2.BoardRequest(runs=[self.id])
        async for board in self._transport.follow("Runs/Board", lambda _: request, board_pb2.Board):
            yield board

    async def wait(self, *, show: bool = False) -> RunInfo:
        """Waits for its end and returns its state. `show` displays the progress meanwhile.

        Raises RunFailedError if it has failed or was cancelled.
        """
        display = ProgressDisplay(Progress(self.id)) if show else None
        async for board in self.watch():
            if display is not None:
                display.update(board)
        info = await self.get_info()
        if info.state != "succeeded":
            raise RunFailedError(f"run {self.id} {info.state}: {info.reason} (A113)")
        return info

    async def watch_facts(self, after: int = 0) -> AsyncIterator[control_pb2.RunEvent]:
        """Yields the facts of the run after a cursor, then new ones, until it ends."""

        def request(after: int) -> control_pb2.WatchRunRequest:
            return control_pb2.WatchRunRequest(run=self.id, after=after)

        follow = self._transport.follow("Runs/Watch", request, control_pb2.RunEvent, after)
        async for event in follow:
            yield event

    async def list_evals(self, suite: str = "") -> list[EvalResult]:
        """Returns its results so far: perplexities, and pass rates of held-out prompts."""
        request = control_pb2.EvalFilter(run=self.id, suite=suite)
        history = await self._transport.call("Evals/History", request, control_pb2.EvalHistory)
        return [EvalResult.from_message(event) for event in history.evals]

    async def read_samples(
        self,
        cycle: int,
        which: Literal["train", "heldout"] = "train",
        *,
        suite: str = "",
        fate: str = "",
        text: str = "",
    ) -> AsyncIterator[Sample]:
        """Yields the samples of a cycle, page by page; of each prompt the first 256.

        `suite` names a prompt suite, with which="heldout". `fate` and `text` select prompts with a
        sample of that outcome (pass, fail, error, kept or a reason of a drop), or that contain a
        text; their other samples come too.
        """
        offset = 0
        while True:
            request = board_pb2.SamplesRequest(
                run=self.id,
                cycle=cycle,
                which=_WHICH[which],
                suite=suite,
                fate=fate,
                text=text,
                offset=offset,
            )
            page = await self._transport.call("Runs/Samples", request, board_pb2.SamplesPage)
            for sample in Sample.from_page(self.id, cycle, page):
                yield sample
            offset += len(page.prompts)
            if not page.prompts or offset >= page.prompts_in_all:
                return

    async def list_checkpoints(self) -> list[control_pb2.CheckpointInfo]:
        """Returns its checkpoints, with the marks `best` and `newest`, without their files."""
        request = control_pb2.ListCheckpointsRequest(run=self.id)
        answer = await self._transport.call(
            "Checkpoints/List", request, control_pb2.ListCheckpointsResponse
        )
        return list(answer.checkpoints)

    async def get_checkpoint(
        self, cycle: int | None = None, step: int | None = None, *, newest: bool = False
    ) -> control_pb2.CheckpointInfo:
        """Returns a checkpoint with its files: the best of the run, its newest, or a given one."""
        reference = self._checkpoint_ref(cycle, step, newest)
        return await self._transport.call("Checkpoints/Get", reference, control_pb2.CheckpointInfo)

    async def download_checkpoint(
        self,
        directory: str | os.PathLike[str],
        cycle: int | None = None,
        step: int | None = None,
        *,
        newest: bool = False,
    ) -> Path:
        """Writes the files of a checkpoint to a directory, and returns its path.

        The gateway compares them with their digests. A file is either complete or absent.
        """
        info = await self.get_checkpoint(cycle, step, newest=newest)
        # The best checkpoint may change during the download.
        cycle, step = info.checkpoint.cycle, info.checkpoint.step
        reference = self._checkpoint_ref(cycle, step, False)
        for file in info.files:
            await self._download_file(reference, file.path, Path(directory, file.path))
        return Path(directory)

    async def _download_file(
        self, reference: control_pb2.CheckpointRef, path: str, target: Path
    ) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.partial")
        request = control_pb2.DownloadRequest(checkpoint=reference, path=path)
        chunks = self._transport.stream("Checkpoints/Download", request, control_pb2.DownloadChunk)
        try:
            with partial.open("wb") as file:
                async for chunk in chunks:
                    file.write(chunk.data)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def _checkpoint_ref(
        self, cycle: int | None, step: int | None, newest: bool
    ) -> control_pb2.CheckpointRef:
        return control_pb2.CheckpointRef(run=self.id, cycle=cycle, step=step, newest=newest)
