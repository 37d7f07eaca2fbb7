"""Tests what a training must have in common with a saved one to continue it."""

import types
import unittest

from flotilla_trainer import call, training

from .test_call import request


class Identities(unittest.TestCase):
    def identity(self, **lora):
        order = request(0)
        order["training"]["lora"] = {"r": 4, "alpha": 8, "targetModules": ["q_proj"], **lora}
        run = types.SimpleNamespace(call=call.read(order))
        return training.Training._identity(run, 3, 6)

    def test_fields_that_earlier_versions_lacked_count_only_if_set(self):
        names = ["alpha", "dropout", "r", "target_modules"]
        self.assertEqual(sorted(self.identity()["lora"]), names)
        for field, key, value in (
            ("freezeA", "freeze_a", True),
            ("quantization", "quantization", "NF4"),
        ):
            self.assertEqual(self.identity(**{field: value})["lora"][key], value)


if __name__ == "__main__":
    unittest.main()
