"""Submission by the program `flotilla`, which finds models and data sets on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import json_format

from flotilla.endpoint import Endpoint
from flotilla.errors import InvalidRequestError, SpecFileError
from flotilla.specs import FileContents, Spec, find_spec_path
from flotilla.v1 import control_pb2

ELSEWHERE_CODE = "R123"
"""The code of a gateway's refusal to look for something on the caller's machine."""


def submit_with_program(
    endpoint: Endpoint,
    spec: Spec,
    text: str,
    files: FileContents | None,
    refusal: InvalidRequestError,
    check_only: bool,
) -> control_pb2.SubmitResponse:
    """Submits a spec that the gateway refused because it names something on this machine.

    Raises SpecFileError if there is no program, or if it fails.
    """
    program = find_program()
    if endpoint.directory is None:
        problem = "connect with the directory of a fleet or of a user, not with an address"
    elif files:
        problem = "write the content of `files` to files beside the spec"
    elif program is None:
        problem = "install `flotilla` beside this Python or on PATH"
    else:
        action = ["run", "check" if check_only else "submit", "--json"]
        with _write_spec(spec, text) as path:
            command = [program, *action, "--dir", str(endpoint.directory), "--", str(path)]
            answer = _run_command(command)
        fields = {"data": answer} if check_only else answer
        response = control_pb2.SubmitResponse()
        return json_format.ParseDict(fields, response, ignore_unknown_fields=True)
    raise SpecFileError(f"{refusal.message}; to let this client do it, {problem}")


def find_program() -> str | None:
    """Returns the path of the program, beside this Python or on PATH."""
    beside = os.path.dirname(sys.executable or "")
    return shutil.which("flotilla", path=beside) or shutil.which("flotilla")


@contextlib.contextmanager
def _write_spec(spec: Spec, text: str) -> Iterator[Path]:
    """Yields the file of a spec; that of a text is in the current directory for a moment."""
    path = find_spec_path(spec)
    if path is not None:
        yield path
        return
    try:
        file = tempfile.NamedTemporaryFile(
            "w", dir=".", prefix=".flotilla-", suffix=".yaml", encoding="utf-8"
        )
    except OSError as error:
        message = f"write the spec to the current directory: {error.strerror} (A104)"
        raise SpecFileError(message) from None
    with file:
        file.write(text)
        file.flush()
        yield Path(file.name)


def _run_command(command: list[str]) -> dict[str, object]:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8")
    if done.returncode != 0:
        raise SpecFileError(_find_error(done.stderr))
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def _find_error(printed: str) -> str:
    """Returns the last error that the program printed as JSON, with its causes."""
    for line in reversed(printed.splitlines()):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = json.loads(line)
            return ": ".join([error["error"], *error["causes"]])
    return f"`flotilla run submit` failed: {printed.strip()}"
