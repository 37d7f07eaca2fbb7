"""Builds the Debian package that `[package.metadata.deb]` of services/flotilla describes.

    build_deb.py PROGRAM ARCHITECTURE DIRECTORY [--quick]

ARCHITECTURE is x86_64 or aarch64. `--quick` compresses little and leaves out the notices, for
tests. Needs cargo and dpkg-deb.
"""

import glob
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

CRATE = Path(__file__).resolve().parents[2] / "services/flotilla"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# The source that stands for PROGRAM.
PROGRAM = "target/release/flotilla"
NOTICES = "../../target/third-party.txt"


def read_package() -> dict[str, Any]:
    command = ["cargo", "metadata", "--format-version=1", "--no-deps", "--offline"]
    metadata = json.loads(subprocess.run(command, cwd=CRATE, check=True, capture_output=True).stdout)
    return next(package for package in metadata["packages"] if package["name"] == "flotilla")


def place_assets(assets: list[list[str]], program: Path, root: Path) -> None:
    """Copies files to their places below `root`, and compresses manual pages, as Debian does."""
    for source, destination, mode in assets:
        found = [program] if source == PROGRAM else sorted(glob.glob(str(CRATE / source)))
        if not found:
            sys.exit(f"build_deb: {source} is missing; see `make release` for what makes it")
        for path in map(Path, found):
            target = root / destination
            if destination.endswith("/"):
                target /= Path(source).name if source == PROGRAM else path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if "/man/" in destination:
                target = target.with_name(f"{target.name}.gz")
                target.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
            else:
                shutil.copyfile(path, target)
            target.chmod(int(mode, 8))


def write_control(package: dict[str, Any], architecture: str, root: Path) -> None:
    deb = package["metadata"]["deb"]
    files = sorted(path for path in root.rglob("*") if path.is_file())
    sums = {path.relative_to(root): hashlib.md5(path.read_bytes()).hexdigest() for path in files}
    fields = {
        "Package": package["name"],
        "Version": f"{package['version']}-1",
        "Architecture": architecture,
        "Maintainer": deb["maintainer"],
        "Section": deb["section"],
        "Priority": deb["priority"],
        "Depends": deb["depends"],
        "Installed-Size": sum(-(-path.stat().st_size // 1024) for path in files),
        "Description": package["description"],
    }
    lines = [f"{name}: {value}" for name, value in fields.items()]
    lines += textwrap.wrap(deb["extended-description"], initial_indent=" ", subsequent_indent=" ")
    control = root / "DEBIAN"
    control.mkdir()
    (control / "control").write_text("\n".join(lines) + "\n")
    (control / "md5sums").write_text("".join(f"{sums[path]}  {path}\n" for path in sums))
    (control / "conffiles").write_text("".join(f"{path}\n" for path in deb["conf-files"]))
    for script in (CRATE / deb["maintainer-scripts"]).iterdir():
        shutil.copyfile(script, control / script.name)
        (control / script.name).chmod(0o755)


def main(program: str, machine: str, directory: str, *options: str) -> None:
    os.umask(0o022)
    package = read_package()
    deb, architecture = package["metadata"]["deb"], ARCHITECTURES[machine]
    quick = "--quick" in options
    copyright_file = [deb["license-file"][0], "usr/share/doc/flotilla/copyright", "644"]
    assets = [asset for asset in deb["assets"] if not (quick and asset[0] == NOTICES)]
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary, "root")
        root.mkdir()
        place_assets([*assets, copyright_file], Path(program), root)
        write_control(package, architecture, root)
        name = f"{package['name']}_{package['version']}-1_{architecture}.deb"
        command = ["dpkg-deb", "--root-owner-group", *(["-Zgzip", "-z1"] if quick else ["-Zxz"])]
        command += ["--build", str(root), str(Path(directory, name))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(*sys.argv[1:])
