"""The address of a fleet's gateway and the credentials for it."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from flotilla.errors import CredentialsError

_OPTIONS: list[tuple[str, str | int]] = [
    # Items of streams have at most 16 MiB.
    ("grpc.max_receive_message_length", 17 << 20),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Gateways are in the own network, as for the other programs of the fleet.
    ("grpc.enable_http_proxy", 0),
]
# The address of a gateway may change. All servers of a closed fleet have this name in their
# certificate.
_SERVER_NAME = "fleet.flotilla.internal"


@dataclass(frozen=True)
class Endpoint:
    """A gateway: `address` is HOST:PORT. An open fleet has neither token nor authority.

    `directory` is where they were read, unless they are arguments.
    """

    address: str
    token: str | None = field(default=None, repr=False)
    ca_pem: bytes | None = field(default=None, repr=False)
    directory: Path | None = field(default=None, compare=False)

    @property
    def is_open(self) -> bool:
        return self.ca_pem is None

    def channel_options(self) -> list[tuple[str, str | int]]:
        if self.is_open:
            return _OPTIONS
        return [*_OPTIONS, ("grpc.ssl_target_name_override", _SERVER_NAME)]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns TLS that trusts only the fleet's authority, with the token in each call."""
        tls = grpc.ssl_channel_credentials(root_certificates=self.ca_pem)
        if self.token is None:
            return tls
        return grpc.composite_channel_credentials(
            tls, grpc.access_token_call_credentials(self.token)
        )

    def open_connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Returns a connection for HTTP. Raises OSError, or ValueError for a wrong address."""
        name, _, port = self.address.rpartition(":")
        host = name.strip("[]")
        connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
        if self.ca_pem is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata=self.ca_pem.decode())
            stream = socket.create_connection((host, int(port)), timeout_s)
            connection.sock = context.wrap_socket(stream, server_hostname=_SERVER_NAME)
        return connection


def find_endpoint(
    directory: str | os.PathLike[str] | None = None,
    *,
    address: str | None = None,
    token: str | None = None,
    ca: str | os.PathLike[str] | bytes | None = None,
) -> Endpoint:
    """Returns the endpoint of a directory, or of an address with its credentials.

    The directory is a fleet's own (`flotilla up`, `flotilla demo --keep`) or one with the
    credentials of a member (`flotilla user create`); the default is FLOTILLA_DIR. `address` alone
    names an open fleet, or replaces the address in the directory. `ca` is the path of `ca.pem`, or
    its content as bytes; `token` is the content of `bearer.jwt`.

    Raises CredentialsError if something is missing or cannot be read.
    """
    if (token is None) != (ca is None):
        missing = "ca" if ca is None else "token"
        raise CredentialsError(
            f"connect to a closed fleet: argument {missing} is missing (A102)",
            remedy="Pass address, token and ca together, or a directory with credentials.",
        )
    if ca is not None:
        if address is None:
            raise CredentialsError(
                "connect to a fleet: argument address is missing (A102)",
                remedy="Pass address as HOST:PORT; `flotilla up` prints it.",
            )
        pem = ca if isinstance(ca, bytes) else _read_file(Path(ca))
        return Endpoint(address, token, pem)
    if directory is None:
        if address is not None:
            return Endpoint(address)
        directory = os.environ.get("FLOTILLA_DIR")
    if not directory:
        raise CredentialsError(
            "connect to a fleet: no directory, no address and no FLOTILLA_DIR (A103)",
            remedy="Pass the directory of a fleet or of a member's credentials, or an address, or "
            "set FLOTILLA_DIR.",
        )
    return _read_directory(Path(directory), address)


def _read_directory(directory: Path, address: str | None) -> Endpoint:
    path = directory / "fleet.json"
    above = next(filter(_has_fleet, directory.resolve().parents[:2]), None)
    if above and not _has_fleet(directory):
        raise CredentialsError(
            f"{directory} is a directory inside a fleet's (A103)",
            remedy=f"Pass the fleet's directory, {above}.",
        )
    try:
        fleet = json.loads(_read_file(path))
        # The program would use the address of the directory.
        source = None if address else directory
        address = address or fleet["gateway"]
        identity = fleet.get("identity")
        if identity is None:
            return Endpoint(address, directory=source)
        bearer, ca = directory / identity["bearer"], directory / identity["ca"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CredentialsError(
            f"{path} is not a fleet's file: {error!r} (A103)",
            remedy="Pass the directory of a fleet, or create the credentials again.",
        ) from None
    return Endpoint(address, _read_file(bearer).decode().strip(), _read_file(ca), source)


def _has_fleet(directory: Path) -> bool:
    try:
        return "gateway" in json.loads((directory / "fleet.json").read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialsError(
            f"read {path}: {error.strerror} (A103)",
            remedy="`flotilla up --dir DIR` starts a fleet in DIR; "
            "`flotilla user create NAME --out DIR` writes credentials to DIR.",
        ) from None
