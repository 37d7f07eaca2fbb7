"""Tests of the data order and the save schedule; they need no torch."""

import types
import unittest

from flotilla_trainer import order, schedule


class Order(unittest.TestCase):
    def test_the_hash_is_blake3(self):
        # From the published test vectors of BLAKE3: the hash of the empty input.
        empty = int.from_bytes(bytes.fromhex("af1349b9f5f9a1a6"), "little")
        self.assertEqual(order.blake3_u64(""), empty)
        with self.assertRaises(ValueError):
            order.blake3_u64("x" * 65)

    def test_each_epoch_visits_every_example_once_in_an_order_of_its_own(self):
        epochs = [order.epoch_order(7, epoch, 50) for epoch in range(3)]
        for epoch in epochs:
            self.assertEqual(sorted(epoch), list(range(50)))
        self.assertEqual(len({tuple(epoch) for epoch in epochs}), 3)
        self.assertEqual(epochs[0], order.epoch_order(7, 0, 50))
        self.assertNotEqual(epochs[0], order.epoch_order(8, 0, 50))

    def test_steps_continue_over_epochs_and_the_last_of_each_may_be_smaller(self):
        steps = list(order.StepSampler(count=10, batch_size=4, end=7, seed=1))
        self.assertEqual([len(step) for step in steps], [4, 4, 2, 4, 4, 2, 4])
        self.assertEqual(sorted(sum(steps[:3], [])), list(range(10)))
        self.assertEqual(len(order.StepSampler(10, 4, 7, 1)), 7)


class CheckpointSchedule(unittest.TestCase):
    def saved(self, steps, save_every, step_s):
        checkpoints = schedule.CheckpointSchedule(steps, save_every, 600.0, 0.0, False)
        return [step for step in range(1, steps + 1) if checkpoints.due(step, step * step_s)]

    def test_saves_the_same_steps_as_the_embedded_trainer(self):
        self.assertEqual(self.saved(50, 0, 0.01), [50])
        self.assertEqual(self.saved(50, 20, 0.01), [20, 40, 50])
        self.assertEqual(self.saved(57, 100, 0.01), [57])
        self.assertEqual(self.saved(57, 0, 1.65), [19, 38, 57])
        self.assertEqual(self.saved(30, 0, 10.0), [6, 10, 20, 30])
        self.assertEqual(self.saved(100, 40, 60.0)[:6], [1, 11, 21, 31, 40, 50])


class Rate(unittest.TestCase):
    def factors(self, steps, kind="LINEAR", warmup=0.1, final=0.1):
        training = types.SimpleNamespace(warmup_ratio=warmup, final_ratio=final, schedule=kind)
        return [schedule.factor(step, steps, training) for step in range(1, steps + 1)]

    def test_rate_rises_then_falls_to_its_final_share(self):
        factors = self.factors(100)
        for step, expected in [(1, 0.1), (10, 1.0), (55, 1 - 0.9 * 45 / 91), (100, 1 - 0.9 * 90 / 91)]:
            self.assertAlmostEqual(factors[step - 1], expected, msg=str(step))

    def test_no_step_has_a_rate_of_0_and_one_has_the_peak(self):
        for steps in (1, 2, 3, 7):
            for kind in ("CONSTANT", "LINEAR", "COSINE"):
                for warmup in (0.0, 0.1, 0.5, 1.0):
                    factors = self.factors(steps, kind, warmup, final=0.0)
                    self.assertGreater(min(factors), 0.0)
                    self.assertEqual(max(factors), 1.0)


if __name__ == "__main__":
    unittest.main()
