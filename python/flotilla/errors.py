"""Exceptions. Each has the stable code of the error and what to do about it."""

from __future__ import annotations

import re

import grpc

from flotilla._remedies import REMEDIES

_CODE = re.compile(r"\(([A-Z]\d{3})\)")


class FlotillaError(Exception):
    """A failed operation.

    `message` says what failed and why. `code` is a stable code such as "R101", or "" if there is
    none; docs/ERRORS.md and `flotilla topics R101` describe it. `remedy` is what to do, from the
    same page.
    """

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        found = _CODE.search(message)
        self.code = found[1] if found else ""
        self.message = message
        self.remedy = REMEDIES.get(self.code, "") if remedy is None else remedy
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message}\n{self.remedy}" if self.remedy else self.message


class CredentialsError(FlotillaError):
    """The address or the credentials of the fleet are missing or cannot be read."""


class SpecFileError(FlotillaError):
    """A spec, or a file that it names, cannot be read here."""


class MissingPackageError(FlotillaError, ImportError):
    """An optional package is not installed."""


class RunFailedError(FlotillaError):
    """A run has failed or was cancelled."""


class RpcError(FlotillaError):
    """A call that failed. `status` is the gRPC status. Subclasses name the frequent cases."""

    def __init__(self, message: str, status: grpc.StatusCode) -> None:
        self.status = status
        super().__init__(message)


class InvalidRequestError(RpcError):
    """The fleet refuses a spec or an argument."""


class NotFoundError(RpcError):
    """There is no such run, checkpoint, channel or agent."""


class StateError(RpcError):
    """The operation does not fit the present state, such as a pause of an ended run."""


class UnauthenticatedError(RpcError):
    """The token is missing, wrong, expired or revoked."""


class PermissionDeniedError(RpcError):
    """The token's scope does not permit the call."""


class LimitError(RpcError):
    """A limit of the gateway is reached: too many or too large requests."""


class DeadlineError(RpcError):
    """The call did not end in time. It may have had its effect: check before repeating it."""


class UnavailableError(RpcError):
    """The gateway cannot be reached, or has lost its log or store. The call may succeed later."""


_BY_STATUS: dict[grpc.StatusCode, type[RpcError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: StateError,
    grpc.StatusCode.ABORTED: StateError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
}


def convert_rpc_error(error: grpc.RpcError, address: str) -> RpcError:
    """Returns the exception for a failed call to the gateway at `address`."""
    return create_rpc_error(error.code(), error.details() or "", address)


def create_rpc_error(status: grpc.StatusCode, details: str, address: str) -> RpcError:
    """Returns the exception for a status, with what the gateway at `address` said of it."""
    if status is grpc.StatusCode.UNAVAILABLE and not _CODE.search(details):
        details = f"call the gateway at {address}: {details} (G106)"
    elif status is grpc.StatusCode.DEADLINE_EXCEEDED and not _CODE.search(details):
        details = f"no answer from the gateway at {address} in time (G102)"
    return _BY_STATUS.get(status, RpcError)(details or status.name, status)
