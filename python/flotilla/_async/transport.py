"""Calls to the gateway: deadlines, errors as exceptions, streams that survive a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from flotilla.endpoint import Endpoint
from flotilla.errors import NotFoundError, UnavailableError, convert_rpc_error
from flotilla.http_calls import post_json
from flotilla.v1 import board_pb2, control_pb2

CALL_LIMIT_S = 40.0
"""Longer than the gateway's own limit of 30 s."""
RECONNECT_LIMIT_S = 60.0
RECONNECT_PAUSE_S = 0.5
KEEP_LIMIT_S = 2.0
"""Time until an answer is kept that was just sent."""
KEEP_PAUSE_S = 0.2

Response = TypeVar("Response", bound=Message)
# Messages of a stream with their position.
Event = TypeVar("Event", control_pb2.EvalEvent, control_pb2.RunEvent, board_pb2.Board)


class Transport:
    """A channel to the gateway. Connects with the first call, and again after a loss."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.address = endpoint.address
        options = endpoint.channel_options()
        if endpoint.is_open:
            self.channel = grpc.aio.insecure_channel(endpoint.address, options)
        else:
            credentials = endpoint.channel_credentials()
            self.channel = grpc.aio.secure_channel(endpoint.address, credentials, options)

    async def close(self) -> None:
        await self.channel.close()

    async def call(
        self,
        method: str,
        request: Message,
        response: type[Response],
        timeout_s: float = CALL_LIMIT_S,
    ) -> Response:
        """Calls a method, such as "Runs/Get", once. Raises RpcError."""
        call = self.channel.unary_unary(
            f"/flotilla.v1.{method}",
            request_serializer=_serialize,
            response_deserializer=response.FromString,
        )
        try:
            answer: Response = await call(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise convert_rpc_error(error, self.address) from None
        return answer

    async def post_feedback(self, feedback: dict[str, object]) -> None:
        """Sends feedback on an answer, which is kept a moment after it was sent. Raises RpcError."""
        ends_at = time.monotonic() + KEEP_LIMIT_S
        while True:
            try:
                await asyncio.to_thread(post_json, self.endpoint, "/v1/feedback", feedback)
                return
            except NotFoundError as error:
                if error.code != "R120" or time.monotonic() > ends_at:
                    raise
                await asyncio.sleep(KEEP_PAUSE_S)

    async def stream(
        self, method: str, request: Message, response: type[Response]
    ) -> AsyncIterator[Response]:
        """Yields the messages of a stream until it ends or breaks off. Raises RpcError."""
        open_stream = self.channel.unary_stream(
            f"/flotilla.v1.{method}",
            request_serializer=_serialize,
            response_deserializer=response.FromString,
        )
        call = open_stream(request)
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise convert_rpc_error(error, self.address) from None
        finally:
            call.cancel()

    async def follow(
        self,
        method: str,
        request: Callable[[int], Message],
        response: type[Event],
        after: int = 0,
    ) -> AsyncIterator[Event]:
        """Yields the messages of a stream, across restarts of the gateway.

        `request` makes the request for the messages after a cursor. Raises UnavailableError if the
        gateway cannot be reached at first, or later for 60 s; other RpcErrors at once.
        """
        # Only later losses are temporary: a wrong address fails here.
        await self.call("Fleet/Hello", control_pb2.HelloRequest(), control_pb2.HelloResponse)
        lost_at: float | None = None
        while True:
            opened_at = time.monotonic()
            try:
                async for message in self.stream(method, request(after), response):
                    after, lost_at = message.cursor, None
                    yield message
                return
            except UnavailableError:
                now = time.monotonic()
                # A quiet stream that stood for longer was lost only now.
                if lost_at is None or now - opened_at > RECONNECT_LIMIT_S:
                    lost_at = now
                if now - lost_at > RECONNECT_LIMIT_S:
                    raise
                await asyncio.sleep(RECONNECT_PAUSE_S)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
