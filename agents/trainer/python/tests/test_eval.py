"""Tests that no setting can enable an evaluation."""

import tempfile
import unittest

import torch
import transformers
from flotilla_trainer import call, training
from flotilla_trainer.errors import Refused


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 2))


def trainer(change=None, callbacks=(), **options):
    policy = call.Policy("cpu", "f32", "sdpa", False, 0, False, 64, None, 600.0)
    train = call.Training(batch_size=1, max_steps=1, schedule="LINEAR", learning_rate=0.1)
    order = call.Call("", "", False, None, "", train, 1, "", None, policy)
    with tempfile.TemporaryDirectory() as directory:
        args = training.arguments(order, directory, 1, torch.device("cpu"))
        if change:
            change(args)
        made = {"model": Model(), "loader": torch.utils.data.DataLoader([1]), **options}
        return training.StepTrainer(args=args, callbacks=list(callbacks), **made)


class Forbidden(unittest.TestCase):
    def test_the_default_trainer_does_not_evaluate(self):
        made = trainer()
        training.forbid_eval(made)
        for evaluate in (made.evaluate, made.predict, made.evaluation_loop):
            with self.assertRaises(Refused):
                evaluate()

    def test_every_way_to_evaluate_is_refused_by_name(self):
        def setting(name, value):
            return lambda made: setattr(made.args, name, value)

        changes = {
            "eval_strategy": setting("eval_strategy", transformers.IntervalStrategy.STEPS)
            if hasattr(transformers, "IntervalStrategy")
            else setting("eval_strategy", "steps"),
            "do_eval": setting("do_eval", True),
            "eval_on_start": setting("eval_on_start", True),
            "load_best_model_at_end": setting("load_best_model_at_end", True),
            "metric_for_best_model": setting("metric_for_best_model", "loss"),
            "eval_dataset": lambda made: setattr(made, "eval_dataset", [1]),
            "compute_metrics": lambda made: setattr(made, "compute_metrics", print),
            "EarlyStoppingCallback": lambda made: made.add_callback(
                transformers.EarlyStoppingCallback()
            ),
        }
        for name, change in changes.items():
            made = trainer()
            change(made)
            with self.assertRaisesRegex(Refused, name):
                training.forbid_eval(made)


if __name__ == "__main__":
    unittest.main()
