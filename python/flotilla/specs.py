"""Run specs and the files that they name, as they are sent to the gateway."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Union

from flotilla.errors import SpecFileError

Spec = Union[str, "os.PathLike[str]", Mapping[str, Any]]
"""A run spec: the path of a YAML file, YAML text, or the same as a dict."""

FileContents = Mapping[str, Union[bytes, str, "os.PathLike[str]"]]
"""Files of a spec by the names that it uses: content as bytes, or paths."""

_FILE_BYTES_MAX = 64 << 20
_WORD = re.compile(r"""[^\s'"\[\]{},]+""")


def read_spec(spec: Spec, files: FileContents | None = None) -> tuple[str, dict[str, bytes]]:
    """Returns the text of a spec and the contents of its files, by name.

    Files are found by their names: relative to a spec's file, otherwise to the current directory.
    `files` adds or replaces some; it is needed for names with spaces. A string of one line that
    ends in .yaml, .yml or .json is a path.

    Raises SpecFileError if a file cannot be read, or all have more than 64 MiB.
    """
    directory = Path()
    if isinstance(spec, Mapping):
        # JSON is YAML.
        text, names = json.dumps(spec, indent=1), list(_strings(spec))
    else:
        path = find_spec_path(spec)
        if path is not None:
            directory = path.parent
            text = _read_file(path).decode()
        else:
            text = str(spec)
        names = _WORD.findall(text)
    given = files or {}
    found = {name for name in names if name not in given and os.path.isfile(directory / name)}
    contents = {name: _read_file(directory / name) for name in sorted(found)}
    for name, content in given.items():
        contents[name] = content if isinstance(content, bytes) else _read_file(Path(content))
    total = sum(map(len, contents.values()))
    if total > _FILE_BYTES_MAX:
        sizes = ", ".join(f"{name} {len(content)} bytes" for name, content in contents.items())
        raise SpecFileError(f"the files of the spec exceed {_FILE_BYTES_MAX} bytes: {sizes} (G112)")
    return text, contents


def find_spec_path(spec: Spec) -> Path | None:
    """Returns the path of a spec's file, or None for a text or a dict."""
    if isinstance(spec, Mapping):
        return None
    if isinstance(spec, str) and ("\n" in spec or not spec.endswith((".yaml", ".yml", ".json"))):
        return None
    return Path(spec)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecFileError(f"read {path}: {error.strerror} (F101)") from None
