"""Calls of the gateway that exist only over HTTP."""

from __future__ import annotations

import http.client
import json

import grpc

from flotilla.endpoint import Endpoint
from flotilla.errors import RpcError, create_rpc_error

_ANSWER_BYTES_MAX = 1 << 20
_LIMIT_S = 40.0
_STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


def post_json(endpoint: Endpoint, path: str, body: dict[str, object]) -> None:
    """Sends JSON to a path of the gateway. Raises RpcError."""
    headers = {"content-type": "application/json"}
    if endpoint.token is not None:
        headers["authorization"] = f"Bearer {endpoint.token}"
    try:
        connection = endpoint.open_connection(_LIMIT_S)
        try:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read(_ANSWER_BYTES_MAX).decode(errors="replace")
        finally:
            connection.close()
    except TimeoutError:
        status = grpc.StatusCode.DEADLINE_EXCEEDED
        raise create_rpc_error(status, "", endpoint.address) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        status = grpc.StatusCode.UNAVAILABLE
        raise create_rpc_error(status, str(error), endpoint.address) from None
    if response.status != 200:
        raise _convert_answer(response.status, text, endpoint.address)


def _convert_answer(code: int, text: str, address: str) -> RpcError:
    try:
        answer = json.loads(text)
        found = answer.get("error", answer)
        message = found if isinstance(found, str) else str(found["message"])
    except (ValueError, LookupError, AttributeError, TypeError):
        message = text.strip()
    status = _STATUSES.get(code, grpc.StatusCode.UNKNOWN)
    return create_rpc_error(status, message or f"HTTP status {code}", address)
