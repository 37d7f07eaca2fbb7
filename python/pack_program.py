"""Packs the program `flotilla` into the wheel, beside the client.

FLOTILLA_PROGRAM         the program; without it, cargo builds one
FLOTILLA_WHEEL_PLATFORM  where the program runs, as in a wheel's name; default: this machine
"""

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProgramHook(BuildHookInterface[Any]):
    """Adds the program as a script, with the notices and the bill of materials if they are there."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        repository = Path(self.root).parent
        program = os.environ.get("FLOTILLA_PROGRAM") or build_program(repository)
        build_data["shared_scripts"][str(program)] = "flotilla"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{find_platform()}"
        for name in ["LICENSE", "target/third-party.txt"]:
            add_file(build_data["extra_metadata"], repository / name)
        bill_of_materials = repository / "target/sbom.cdx.json"
        if bill_of_materials.exists():
            build_data["sbom_files"].append(str(bill_of_materials))


def build_program(repository: Path) -> Path:
    command = ["cargo", "build", "--locked", "--release", "--bin", "flotilla"]
    try:
        subprocess.run(command, cwd=repository, check=True)
    except FileNotFoundError:
        raise RuntimeError(
            "this builds the program with cargo, which is not installed; install it from "
            "rustup.rs, or install a wheel of a release, which contains the program"
        ) from None
    target = Path(os.environ.get("CARGO_TARGET_DIR", repository / "target"))
    return target / "release/flotilla"


def find_platform() -> str:
    default = sysconfig.get_platform()
    return os.environ.get("FLOTILLA_WHEEL_PLATFORM", default).replace("-", "_").replace(".", "_")


def add_file(files: dict[str, str], path: Path) -> None:
    if path.exists():
        files[str(path)] = path.name
