"""Tests of reading examples and splitting steps into passes."""

import json
import os
import tempfile
import unittest

from flotilla_trainer import examples
from flotilla_trainer.errors import Refused


class Bytes:
    """A tokenizer with one token per byte."""

    class Encoding:
        def __init__(self, ids):
            self.ids = ids

    def encode(self, text, add_special_tokens):
        return self.Encoding(list(text.encode()))


class EndToken(unittest.TestCase):
    def end(self, **files):
        with tempfile.TemporaryDirectory() as directory:
            for name, value in files.items():
                with open(os.path.join(directory, f"{name}.json"), "w", encoding="utf-8") as file:
                    json.dump(value, file)
            return examples.end_token(directory)

    def test_prefers_the_tokenizer_s_end_token_if_generation_stops_there(self):
        config = {"eos_token_id": 1}
        generation = {"eos_token_id": [8, 9]}
        added = {"added_tokens": [{"id": 9, "content": "<|eot|>"}, {"id": 7, "content": "x"}]}
        files = {"config": config, "generation_config": generation, "tokenizer": added}
        self.assertEqual(self.end(**files), 1)
        settings = {"eos_token": {"content": "<|eot|>"}}
        self.assertEqual(self.end(**files, tokenizer_config=settings), 9)
        decoder = {"8": {"content": "<|eom|>"}}
        settings = {"eos_token": "<|eom|>", "added_tokens_decoder": decoder}
        self.assertEqual(self.end(**files, tokenizer_config=settings), 8)
        self.assertEqual(self.end(**files, tokenizer_config={"eos_token": "x"}), 1)
        # Of a model with images.
        self.assertEqual(self.end(config={"text_config": config}), 1)
        self.assertEqual(self.end(config={"text_config": config, "eos_token_id": 0}), 0)
        with self.assertRaisesRegex(Refused, "names no eos_token_id"):
            self.end(config={})


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
        self.assertEqual(found, [examples.Example(2, "a", "b")])
        found = self.read(b'{"completion":"b","advantage":-0.5}')
        self.assertEqual(found, [examples.Example(1, "", "b", -0.5)])

    def sequences(self, most, lines, vocab_size=257, unit=1):
        lines = [examples.Example(*line, 0.5) for line in lines]
        return examples.Sequences(lines, Bytes(), 256, vocab_size, most, 100, unit)

    def test_long_examples_are_skipped_and_counted(self):
        lines = [(1, "ab", "c"), (4, "abc", "de"), (5, "", "x")]
        kept = self.sequences(6, lines)
        self.assertEqual((len(kept), kept.skipped), (3, 0))
        self.assertEqual(kept[1], ([97, 98, 99, 100, 101, 256], range(3, 6), 1))
        kept = self.sequences(5, lines)
        self.assertEqual((len(kept), kept.skipped), (2, 1))
        self.assertEqual(kept[1], ([120, 256], range(1, 2), 1))
        self.assertEqual([one.line for one in kept.examples()], [1, 5])
        pairs = self.sequences(5, [*lines, (6, "", "y")], unit=2)
        self.assertEqual((len(pairs), pairs.skipped), (2, 2))
        self.assertEqual(pairs[0], ([120, 256], range(1, 2), 0))
        with self.assertRaisesRegex(Refused, "all 2 examples are longer than the 3 tokens allowed"):
            self.sequences(3, lines[:2])

    def test_drawn_tokens_and_cut_completions_have_no_end_added(self):
        exact = examples.Example(1, "ab", "c", token_ids=[7, 256])
        cut = examples.Example(2, "ab", "c", unfinished=True)
        found = examples.Sequences([exact, cut], Bytes(), 256, 257, 9, 100)
        self.assertEqual(found[0], ([97, 98, 7, 256], range(2, 4), 0))
        self.assertEqual(found[1], ([97, 98, 99], range(2, 3), 1))

    def masked(self, *ranges):
        episode = examples.Example(1, "ab", "c", token_ids=[7, 256, 8, 9, 5], masked=ranges)
        return examples.Sequences([episode], Bytes(), 256, 257, 9, 100)

    def test_observations_are_read_and_not_learned(self):
        tokens, scored, _ = self.masked([2, 4])[0]
        self.assertEqual((tokens, scored), ([97, 98, 7, 256, 8, 9, 5], [2, 3, 6]))
        for packed in (True, False):
            part = examples.PassCollator(20, packed)([(tokens, scored, 0)])["parts"][0]
            self.assertEqual((part["scored"], part["lengths"]), (3, [3]))
            if packed:
                self.assertEqual(part["rows"].tolist(), [1, 2, 5])
                self.assertEqual(part["targets"].tolist(), [7, 256, 5])
            else:
                labels = part["labels"][0].tolist()
                self.assertEqual(labels, [-100, -100, 7, 256, -100, -100, 5])

    def test_masks_out_of_bounds_are_refused(self):
        for ranges in ([[0, 1]], [[3, 2]], [[2, 9]], [[2, 4], [3, 5]]):
            with self.assertRaisesRegex(Refused, "line 1: the masked tokens"):
                self.masked(*ranges)

    def test_tokens_the_model_lacks_are_refused(self):
        with self.assertRaisesRegex(Refused, "vocab_size 200"):
            self.sequences(9, [(1, "a", "b")], vocab_size=200)


class Splitting(unittest.TestCase):
    SEQUENCES = [([1] * length, range(1, length)) for length in (3, 9, 2, 40, 3)]

    def shapes(self, packed):
        parts = examples.PassCollator(20, packed)(self.SEQUENCES)["parts"]
        names = ("tokens", "scored", "computed")
        total = {name: sum(part[name] for part in parts) for name in names}
        return [tuple(part["input_ids"].shape) for part in parts], total

    def test_a_pass_has_limited_tokens_or_one_example(self):
        shapes, total = self.shapes(packed=False)
        self.assertEqual(shapes, [(1, 40), (2, 9), (2, 3)])
        self.assertEqual(total, {"tokens": 57, "scored": 57 - 5, "computed": 40 + 18 + 6})

    def test_pairs_stay_in_one_pass(self):
        lengths = (3, 9, 2, 40, 3, 4)
        sequences = [([1] * length, range(1, length), i) for i, length in enumerate(lengths)]
        for packed in (True, False):
            parts = examples.PassCollator(20, packed, 2)(sequences)["parts"]
            found = [part["indices"] for part in parts]
            self.assertGreater(len(found), 1)
            for pair in ({0, 1}, {2, 3}, {4, 5}):
                self.assertTrue(any(pair <= set(indices) for indices in found), found)

    def test_a_packed_pass_has_no_padding(self):
        shapes, total = self.shapes(packed=True)
        # The last token of a sequence is only a target.
        self.assertEqual(shapes, [(1, 39), (1, 17 - 4)])
        self.assertEqual(total, {"tokens": 57, "scored": 57 - 5, "computed": 57})


if __name__ == "__main__":
    unittest.main()
