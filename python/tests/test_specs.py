"""Specs as files, texts and dicts, with the files that they name."""

import os
import tempfile
import unittest
from pathlib import Path

from flotilla import SpecFileError
from flotilla.specs import read_spec

TEXT = """\
name: sums
base: { model: store:models/a }
sft: {data: data.jsonl, other: 'quoted.jsonl', absent: none.jsonl}
"""


class SpecTests(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        for name in ("data.jsonl", "quoted.jsonl", "unnamed.jsonl"):
            (self.directory / name).write_text(name)

    def enter_directory(self) -> None:
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.directory)

    def test_files_of_a_path_are_beside_it(self) -> None:
        path = self.directory / "spec.yaml"
        path.write_text(TEXT)
        for spec in (path, str(path)):
            text, files = read_spec(spec)
            self.assertEqual(text, TEXT)
            self.assertEqual(files, {"data.jsonl": b"data.jsonl", "quoted.jsonl": b"quoted.jsonl"})

    def test_files_of_a_text_and_a_dict_are_in_the_current_directory(self) -> None:
        self.enter_directory()
        _, files = read_spec(TEXT)
        self.assertEqual(sorted(files), ["data.jsonl", "quoted.jsonl"])
        spec = {"name": "sums é", "sft": {"data": "data.jsonl"}, "evals": [{"text": "x" * 9999}]}
        text, files = read_spec(spec)
        self.assertEqual(files, {"data.jsonl": b"data.jsonl"})
        self.assertIn('"name": "sums', text)

    def test_given_files_replace_those_on_the_disk(self) -> None:
        self.enter_directory()
        given: dict[str, bytes | str] = {"data.jsonl": b"mine", "with space.jsonl": "unnamed.jsonl"}
        _, files = read_spec("sft: {data: data.jsonl}\n", given)
        self.assertEqual(files, {"data.jsonl": b"mine", "with space.jsonl": b"unnamed.jsonl"})

    def test_absent_and_large_files_are_errors(self) -> None:
        with self.assertRaisesRegex(
            SpecFileError, "none.yaml: No such file.* \\(F101\\)"
        ) as raised:
            read_spec("none.yaml")
        self.assertEqual(raised.exception.code, "F101")
        with self.assertRaisesRegex(SpecFileError, "big.jsonl 67108865 bytes"):
            read_spec("a: 1\n", {"big.jsonl": bytes((64 << 20) + 1)})


if __name__ == "__main__":
    unittest.main()
