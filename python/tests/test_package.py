"""The package agrees with itself and with the workspace."""

import inspect
import re
import unittest
from pathlib import Path

import flotilla
from flotilla import aio

PYTHON = Path(__file__).resolve().parents[1]


class PackageTests(unittest.TestCase):
    def test_the_version_is_that_of_the_program(self) -> None:
        workspace = (PYTHON / "../Cargo.toml").read_text()
        self.assertIn(f'\nversion = "{flotilla.__version__}"\n', workspace)

    def test_the_least_protobuf_is_the_one_that_made_the_messages(self) -> None:
        stubs = (PYTHON / "flotilla/v1/control_pb2.py").read_text()
        made = re.search(r"^# Protobuf Python Version: (\S+)$", stubs, re.MULTILINE)
        assert made is not None
        major = int(made[1].split(".")[0])
        # A runtime reads what the compiler of its own major version or the one before made.
        bounds = f'"protobuf>={made[1]},<{major + 2}"'
        self.assertIn(bounds, (PYTHON / "pyproject.toml").read_text())

    def test_both_clients_have_the_same_methods(self) -> None:
        for sync, asynchronous in [(flotilla.Fleet, aio.Fleet), (flotilla.Run, aio.Run)]:
            names = [{n for n in vars(it) if not n.startswith("_")} for it in (sync, asynchronous)]
            self.assertEqual(*names)
            for name in names[0]:
                method = getattr(sync, name)
                self.assertTrue(method.__doc__, name)
                self.assertFalse(inspect.iscoroutinefunction(method), name)
                self.assertFalse(inspect.isasyncgenfunction(method), name)


if __name__ == "__main__":
    unittest.main()
