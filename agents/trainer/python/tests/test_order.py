"""The order of the data and the cadence of saving: no torch needed."""

import unittest

from flotilla_trainer import order, schedule


class Order(unittest.TestCase):
    def test_the_hash_is_blake3(self):
        # The first eight bytes of BLAKE3 of nothing, as its authors publish them.
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

    def test_steps_go_on_over_epochs_and_the_last_of_each_may_be_smaller(self):
        steps = list(order.Steps(count=10, batch_size=4, steps=7, seed=1))
        self.assertEqual([len(step) for step in steps], [4, 4, 2, 4, 4, 2, 4])
        self.assertEqual(sorted(sum(steps[:3], [])), list(range(10)))
        self.assertEqual(len(order.Steps(10, 4, 7, 1)), 7)


class Cadence(unittest.TestCase):
    def saved(self, steps, save_every, step_s):
        cadence = schedule.Cadence(steps, save_every, 600.0, 0.0, False)
        return [step for step in range(1, steps + 1) if cadence.due(step, step * step_s)]

    def test_it_saves_as_the_embedded_trainer_does(self):
        self.assertEqual(self.saved(50, 0, 0.01), [50])
        self.assertEqual(self.saved(50, 20, 0.01), [20, 40, 50])
        self.assertEqual(self.saved(57, 100, 0.01), [57])
        self.assertEqual(self.saved(57, 0, 1.65), [19, 38, 57])
        self.assertEqual(self.saved(30, 0, 10.0), [6, 10, 20, 30])
        self.assertEqual(self.saved(100, 40, 60.0)[:6], [1, 11, 21, 31, 40, 50])


class Rate(unittest.TestCase):
    class Training:
        warmup_ratio, final_ratio, schedule = 0.1, 0.1, "LINEAR"

    def test_it_climbs_then_falls_to_its_final_share(self):
        for step, expected in [(1, 0.1), (10, 1.0), (55, 0.55), (100, 0.1)]:
            found = schedule.factor(step, 100, self.Training)
            self.assertAlmostEqual(found, expected, msg=str(step))


if __name__ == "__main__":
    unittest.main()
