"""A fleet: its runs, evals, agents and channels."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from types import TracebackType

import grpc.aio
from google.protobuf.message import Message

from flotilla._async.run import Run
from flotilla._async.transport import CALL_LIMIT_S, Response, Transport
from flotilla.endpoint import Endpoint, find_endpoint
from flotilla.errors import InvalidRequestError
from flotilla.program import ELSEWHERE_CODE, submit_with_program
from flotilla.records import EvalResult, RunInfo
from flotilla.specs import FileContents, Spec, read_spec
from flotilla.v1 import control_pb2, fleet_pb2

_SUBMIT_LIMIT_S = 120.0


def connect(
    directory: str | os.PathLike[str] | None = None,
    *,
    address: str | None = None,
    token: str | None = None,
    ca: str | os.PathLike[str] | bytes | None = None,
) -> Fleet:
    """Returns the fleet of a directory (default: FLOTILLA_DIR), or of an address.

    The directory is a fleet's own (`flotilla up`, `flotilla demo --keep`) or one that `flotilla
    user create` made. A closed fleet without a directory needs `address` (HOST:PORT), `token` (the
    content of bearer.jwt) and `ca` (the path of ca.pem, or its content as bytes); an open fleet
    only `address`.

    Raises CredentialsError if the credentials are incomplete. Connects with the first call.
    """
    return Fleet(find_endpoint(directory, address=address, token=token, ca=ca))


class Fleet:
    """A connection to a fleet's gateway. Every method can raise RpcError."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._transport = Transport(endpoint)

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection and ends its streams."""
        await self._transport.close()

    @property
    def channel(self) -> grpc.aio.Channel:
        """The gRPC channel with the fleet's credentials, for generated stubs."""
        return self._transport.channel

    async def call(
        self,
        method: str,
        request: Message,
        response: type[Response],
        timeout_s: float = CALL_LIMIT_S,
    ) -> Response:
        """Calls any method of the API that has one answer, such as "Runs/Audit"."""
        return await self._transport.call(method, request, response, timeout_s)

    async def get_caller(self) -> control_pb2.HelloResponse:
        """Returns the gateway's version, and the name and scope of the caller."""
        request = control_pb2.HelloRequest()
        return await self._transport.call("Fleet/Hello", request, control_pb2.HelloResponse)

    async def check_spec(
        self, spec: Spec, files: FileContents | None = None
    ) -> control_pb2.DataReport:
        """Checks a spec and its files without starting a run.

        Returns numbers and warnings on the data. Raises InvalidRequestError with the field at
        fault.
        """
        response = await self._submit(spec, files, check_only=True)
        return response.data

    async def submit(self, spec: Spec, files: FileContents | None = None) -> Run:
        """Starts a run: of a YAML file, YAML text or a dict; of a sweep, the first run.

        The files that the spec names are read and sent, at most 64 MiB; `files` adds others by
        name. A spec that names a model's directory, or a model or data set of the hub, is submitted
        by the program `flotilla` beside this Python or on PATH, with the directory of `connect`.
        Raises SpecFileError if something cannot be read, InvalidRequestError for a spec that the
        fleet refuses.
        """
        response = await self._submit(spec, files)
        return self.run(response.run)

    async def submit_sweep(self, spec: Spec, files: FileContents | None = None) -> list[Run]:
        """Starts all runs of a spec with a sweep; as `submit`."""
        response = await self._submit(spec, files)
        return [self.run(run_id) for run_id in response.runs]

    async def _submit(
        self, spec: Spec, files: FileContents | None, check_only: bool = False
    ) -> control_pb2.SubmitResponse:
        text, contents = read_spec(spec, files)
        request = control_pb2.SubmitRequest(spec_yaml=text, files=contents, check_only=check_only)
        try:
            return await self._transport.call(
                "Runs/Submit", request, control_pb2.SubmitResponse, _SUBMIT_LIMIT_S
            )
        except InvalidRequestError as error:
            if error.code != ELSEWHERE_CODE:
                raise
            refusal = error
        return await asyncio.to_thread(
            submit_with_program, self.endpoint, spec, text, files, refusal, check_only
        )

    def run(self, run_id: str) -> Run:
        """Returns a run by its id, without a call."""
        return Run(self._transport, run_id)

    async def list_runs(self) -> list[RunInfo]:
        """Returns all runs, the oldest first."""
        request = control_pb2.ListRunsRequest()
        answer = await self._transport.call("Runs/List", request, control_pb2.ListRunsResponse)
        return [RunInfo.from_message(run) for run in answer.runs]

    async def watch_evals(
        self, run_id: str = "", suite: str = "", after: int = 0
    ) -> AsyncIterator[EvalResult]:
        """Yields the results after a cursor, then new ones as they are measured, without end.

        Each comes once and in order, also across restarts of the gateway. To continue later, pass
        the cursor of the last one as `after`. Empty names: all runs, all suites.
        """
        wanted = control_pb2.EvalFilter(run=run_id, suite=suite)

        def request(after: int) -> control_pb2.WatchEvalsRequest:
            return control_pb2.WatchEvalsRequest(filter=wanted, after=after)

        follow = self._transport.follow("Evals/Watch", request, control_pb2.EvalEvent, after)
        async for event in follow:
            yield EvalResult.from_message(event)

    async def list_agents(self) -> list[fleet_pb2.AgentStatus]:
        """Returns the agents with their jobs, roles and measurements."""
        request = control_pb2.AgentsRequest()
        answer = await self._transport.call("Fleet/Agents", request, control_pb2.AgentsResponse)
        return list(answer.agents)

    async def drain_agent(self, agent: str) -> None:
        """Lets an agent finish its jobs and leave."""
        request = control_pb2.DrainRequest(agent=agent)
        await self._transport.call("Fleet/Drain", request, control_pb2.DrainResponse)

    async def list_channels(self) -> list[control_pb2.Channel]:
        """Returns the channels: names that point to a model, such as `stable`."""
        request = control_pb2.ListChannelsRequest()
        answer = await self._transport.call(
            "Channels/List", request, control_pb2.ListChannelsResponse
        )
        return list(answer.channels)

    async def move_channel(
        self, channel: str, run_id: str, *, reason: str = "", if_better: bool = False
    ) -> control_pb2.Channel:
        """Points a channel to the best checkpoint of a run.

        With `if_better`, raises StateError unless it passes more held-out prompts than the present
        model.
        """
        request = control_pb2.MoveChannelRequest(
            channel=channel,
            checkpoint=control_pb2.CheckpointRef(run=run_id),
            reason=reason,
            if_better=if_better,
        )
        return await self._transport.call("Channels/Move", request, control_pb2.Channel)

    async def roll_back_channel(
        self, channel: str, *, reason: str = "", number: int | None = None
    ) -> control_pb2.Channel:
        """Points a channel to the model before its present one.

        `number` is the last move that you know: with a later one, raises StateError.
        """
        request = control_pb2.RollBackRequest(channel=channel, reason=reason, number=number)
        return await self._transport.call("Channels/RollBack", request, control_pb2.Channel)

    async def give_feedback(
        self,
        channel: str,
        answer_id: str,
        *,
        rating: str = "",
        reward: float | None = None,
        edit: str = "",
        comment: str = "",
    ) -> None:
        """Records what users say of an answer to a request to a channel.

        `answer_id` is the `id` of the answer, `rating` "up" or "down", `reward` a number from 0 to
        1 in its place, and `edit` the right answer. It replaces earlier feedback on the answer.
        Raises NotFoundError if the answer is not kept.
        """
        said: dict[str, object] = {"rating": rating, "edit": edit, "comment": comment}
        said = {name: text for name, text in said.items() if text}
        if reward is not None:
            said["reward"] = reward
        await self._transport.post_feedback({"model": channel, "id": answer_id, **said})

    async def read_exchanges(self, channel: str) -> AsyncIterator[control_pb2.KeptExchange]:
        """Yields the kept requests to a channel with answers and feedback, the oldest first."""
        request = control_pb2.KeptRequest(channel=channel)
        exchanges = self._transport.stream("Channels/Kept", request, control_pb2.KeptExchange)
        async for exchange in exchanges:
            yield exchange
