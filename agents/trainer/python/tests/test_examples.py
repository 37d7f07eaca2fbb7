"""Reading examples and cutting steps into passes."""

import os
import tempfile
import unittest

from flotilla_trainer import examples
from flotilla_trainer.errors import Refused


class Bytes:
    """A tokenizer of one token a byte."""

    class Encoding:
        def __init__(self, ids):
            self.ids = ids

    def encode(self, text, add_special_tokens):
        return self.Encoding(list(text.encode()))


class Reading(unittest.TestCase):
    def read(self, data):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "data.jsonl")
            with open(path, "wb") as file:
                file.write(data)
            return examples.read(path)

    def test_each_mistake_names_its_line(self):
        for data, expected in [
            (b'{"completion":"a"}\n[]', "line 2: expected an object"),
            (b'{"prompt":"a"}', "line 1: expected an object"),
            (b'{"prompt":1,"completion":"a"}', "line 1: expected an object"),
            (b'{"prompt":"a","completion":""}', 'line 1: field "completion"'),
            (b"\n", "no examples"),
            (b"\xff", "not UTF-8"),
        ]:
            with self.assertRaisesRegex(Refused, expected):
                self.read(data)

    def test_other_fields_are_ignored_and_blank_lines_counted(self):
        found = self.read(b'\n{"prompt":"a","completion":"b","reward":1.0}\r\n')
        self.assertEqual(found, [(2, "a", "b")])

    def test_what_is_too_long_is_named_and_never_cut(self):
        def sequences(most):
            lines = [(1, "ab", "c"), (4, "abc", "de")]
            return examples.Sequences(lines, Bytes(), 256, 257, most, 100)

        self.assertEqual(sequences(6)[1], ([97, 98, 99, 100, 101, 256], 3))
        with self.assertRaisesRegex(Refused, "line 4 has 6 tokens, more than the 5 allowed"):
            sequences(5)
        with self.assertRaisesRegex(Refused, "vocab_size 200"):
            examples.Sequences([(1, "a", "b")], Bytes(), 256, 200, 9, 9)
        self.assertEqual(examples.Sequences([(1, "", "b")], Bytes(), 256, 257, 9, 9)[0][1], 1)


class Cutting(unittest.TestCase):
    def test_passes_hold_so_many_tokens_or_one_example(self):
        sequences = [([1] * length, 1) for length in (3, 9, 2, 40, 3)]
        parts = examples.Parts(20)(sequences)["parts"]
        shapes = [tuple(part["input_ids"].shape) for part in parts]
        self.assertEqual(shapes, [(1, 40), (2, 9), (2, 3)])
        counted = sum(int(part["attention_mask"].sum()) for part in parts)
        self.assertEqual(counted, 57)
        scored = sum(int((part["labels"] != examples.IGNORED).sum()) for part in parts)
        self.assertEqual(scored, 57 - 5)


if __name__ == "__main__":
    unittest.main()
