"""Tests of parsing calls; they need no torch."""

import unittest

from flotilla_trainer import call
from flotilla_trainer.errors import Refused


def request(tokens, **policy):
    return {
        "base": "b", "base_name": "b3:b", "random_init": False, "adapter": None, "dataset": "d",
        "seed": 7, "out": "o", "resume": None,
        "training": {
            "maxSteps": 6, "batchSize": 4, "learningRate": 0.001, "schedule": "LINEAR",
            "maxTokens": 512, "microBatchTokens": tokens,
        },
        "policy": {
            "device": "cpu", "dtype": "f32", "attention": "sdpa", "gradient_checkpointing": False,
            "dataloader_workers": 0, "pin_memory": False, "micro_batch_tokens": 64,
            "memory_fraction": None, "save_s": 600.0, **policy,
        },
    }  # fmt: skip


class Passes(unittest.TestCase):
    def test_each_halving_halves_the_tokens_of_a_pass(self):
        tokens = [call.read(request(0, halvings=n)).pass_tokens() for n in (0, 1, 2)]
        self.assertEqual(tokens, [64, 32, 16])
        self.assertEqual(call.read(request(1024, halvings=1)).pass_tokens(), 512)
        self.assertEqual(call.read(request(1, halvings=31)).pass_tokens(), 1)
        self.assertEqual(call.read(request(1024)).pass_tokens(), 1024)

    def test_invalid_halvings_are_refused_by_name(self):
        for wrong in (-1, 1.5, True, "2", 99):
            with self.assertRaisesRegex(Refused, "halvings"):
                call.read(request(64, halvings=wrong))

    def test_packing_is_on_by_default(self):
        self.assertTrue(call.read(request(0)).training.packing)
        off = request(0)
        off["training"]["packing"] = False
        self.assertFalse(call.read(off).training.packing)
        off["training"]["packing"] = "no"
        with self.assertRaisesRegex(Refused, "packing"):
            call.read(off)

    def test_a_dropout_is_a_share_below_one(self):
        lora = {"r": 4, "alpha": 8, "targetModules": ["q_proj"]}
        order = request(0)
        order["training"]["lora"] = lora
        self.assertEqual(call.read(order).training.lora.dropout, 0.0)
        order["training"]["lora"] = {**lora, "dropout": 0.05}
        self.assertEqual(call.read(order).training.lora.dropout, 0.05)
        for wrong in (1, -0.1, True, "much"):
            order["training"]["lora"] = {**lora, "dropout": wrong}
            with self.assertRaisesRegex(Refused, "lora.dropout"):
                call.read(order)
