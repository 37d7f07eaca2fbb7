"""Tests that the weights of every objective are the negative gradient of its loss, which is written
here from the papers and differentiated by autograd."""

import math
import unittest

import torch
from flotilla_trainer.errors import Refused
from flotilla_trainer.objectives import Objective, Signal, Totals
from torch.nn.functional import logsigmoid

LENGTHS = (3, 5, 2, 4)
ADVANTAGES = (1.0, -0.5, 0.7, -1.2)


def sequences():
    """Returns signals and present log-probabilities. Ratios lie on both sides of all bounds."""
    generator = torch.Generator().manual_seed(5)

    def draw(count, scale):
        return scale * torch.rand(count, generator=generator, dtype=torch.float64)

    found = []
    for length, advantage, spread in zip(LENGTHS, ADVANTAGES, (0.01, 4.0, 0.6, 0.3)):
        old = -0.1 - draw(length, 2.0)
        now = (old + spread * (draw(length, 1.0) - 0.5)).clamp(max=-0.01).requires_grad_()
        found.append((Signal(advantage, old, old - draw(length, 0.3)), now))
    return found


def surrogate(signal, now, low, high):
    ratio = (now - signal.old).exp()
    gain = signal.advantage
    return -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)


def sequence_surrogate(signal, now, low, high):
    ratio = (now - signal.old).mean().exp()
    gain = signal.advantage
    return -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)


def mean(losses):
    return sum(losses) / len(losses)


def single_losses(all_, tokens):
    """Returns the loss of each objective of single sequences."""
    base = mean([float((now.detach() - signal.reference).sum()) for signal, now in all_])

    def kto(signal, now):
        gain = (now - signal.reference).sum() - max(base, 0.0)
        return 1 - torch.sigmoid((0.1 if signal.advantage > 0 else -0.1) * gain)

    return {
        "ssd": mean([-signal.advantage * now.sum() for signal, now in all_]),
        "dft": mean([-signal.advantage * (now.detach().exp() * now).sum() for signal, now in all_]),
        "rloo": mean([-signal.advantage * now.sum() for signal, now in all_]),
        "raft_plus_plus": mean([surrogate(*one, 0.2, 0.2).mean() for one in all_]),
        "reinforce_rej": mean([surrogate(*one, 0.2, 0.2).mean() for one in all_]),
        "grpo": mean([surrogate(*one, 0.2, 0.2).mean() for one in all_]),
        "dr_grpo": mean([surrogate(*one, 0.2, 0.2).sum() / 9 for one in all_]),
        "dapo": sum(surrogate(*one, 0.2, 0.28).sum() for one in all_) / tokens,
        "gspo": mean([sequence_surrogate(*one, 3e-4, 4e-4) for one in all_]),
        "cispo": sum(
            -((now.detach() - signal.old).exp().clamp(max=5.0) * signal.advantage * now).sum()
            for signal, now in all_
        ) / tokens,
        "distillation": sum(
            -((signal.reference - now.detach()) * now).sum() for signal, now in all_
        ) / tokens,
        "kto": mean([kto(*one) for one in all_]),
    }  # fmt: skip


def pair_losses(all_):
    """Returns the loss of each objective of pairs."""
    pairs = [(all_[0], all_[1]), (all_[2], all_[3])]

    def gain(one):
        return (one[1] - one[0].reference).sum()

    def odds(one):
        return one[1].mean() - (1 - one[1].mean().exp()).log()

    return {
        "dpo": mean([-logsigmoid(0.1 * (gain(a) - gain(b))) for a, b in pairs]),
        "simpo": mean([-logsigmoid(2.5 * (a[1].mean() - b[1].mean()) - 1.375) for a, b in pairs]),
        "orpo": mean([-a[1].mean() - 0.1 * logsigmoid(odds(a) - odds(b)) for a, b in pairs]),
    }


class Objectives(unittest.TestCase):
    def expect_weights(self, name, settings, all_, loss, totals):
        gradients = torch.autograd.grad(loss, [now for _, now in all_], allow_unused=True)
        objective = Objective(name, settings)
        fixed = [(signal, now.detach()) for signal, now in all_]
        starts = range(0, len(fixed), objective.unit)
        units = [fixed[start : start + objective.unit] for start in starts]
        found = [weights for unit in units for weights, *_ in objective.weigh(unit, totals)]
        for weights, gradient in zip(found, gradients):
            torch.testing.assert_close(weights, -gradient, rtol=1e-9, atol=1e-12, msg=name)
        self.assertGreater(max(float(weights.abs().max()) for weights in found), 1e-4, name)

    def test_weights_are_the_negative_gradient_of_the_loss(self):
        all_ = sequences()
        tokens = sum(LENGTHS)
        gains = [float((now.detach() - signal.reference).sum()) for signal, now in all_]
        totals = Totals(len(all_), tokens, mean(gains))
        losses = {**single_losses(all_, tokens), **pair_losses(all_)}
        self.assertEqual(len(losses), 15)
        for name, loss in losses.items():
            settings = {"max_tokens": 9} if name == "dr_grpo" else {}
            self.expect_weights(name, settings, all_, loss, totals)

    def test_the_divergence_from_the_reference_is_added(self):
        all_ = sequences()
        apart = [signal.reference - now for signal, now in all_]
        divergence = mean([(one.exp() - one - 1).sum() for one in apart])
        loss = single_losses(all_, sum(LENGTHS))["rloo"] + 0.3 * divergence
        totals = Totals(len(all_), sum(LENGTHS), 0.0)
        self.expect_weights("rloo", {"kl": 0.3}, all_, loss, totals)

    def test_a_gap_to_the_teacher_counts_up_to_its_limit(self):
        all_, tokens = sequences(), sum(LENGTHS)
        gaps = [(signal.reference - now.detach()).clamp(-0.1, 0.1) for signal, now in all_]
        self.assertTrue(any(bool((gap.abs() < 0.1).any()) for gap in gaps))
        loss = sum(-(gap * now).sum() for gap, (_, now) in zip(gaps, all_)) / tokens
        totals = Totals(len(all_), tokens, 0.0)
        self.expect_weights("distillation", {"max_gap": 0.1}, all_, loss, totals)

    def test_corrections_multiply_by_a_bounded_ratio_of_the_engines(self):
        all_ = [(signal, now.detach()) for signal, now in sequences()]
        for signal, now in all_:
            signal.behaviour = signal.old + torch.linspace(-2.0, 1.0, len(now), dtype=now.dtype)
        totals = Totals(len(all_), sum(LENGTHS), 0.0)
        for key, masks, whole in [
            ("truncate_tokens", False, False),
            ("truncate_sequences", False, True),
            ("mask_tokens", True, False),
            ("mask_sequences", True, True),
        ]:
            corrected, bounded = Objective("rloo", {key: 1.5}), 0
            self.assertTrue(corrected.needs_old() and corrected.needs_behaviour())
            for signal, now in all_:
                [(plain, *_)] = Objective("rloo", {}).weigh([(signal, now)], totals)
                [(found, *_)] = corrected.weigh([(signal, now)], totals)
                apart = [float(value) for value in signal.old - signal.behaviour]
                for token, difference in enumerate(apart):
                    ratio = math.exp(sum(apart) if whole else difference)
                    bounded += ratio > 1.5
                    factor = ratio if ratio <= 1.5 else (0.0 if masks else 1.5)
                    self.assertAlmostEqual(float(found[token]), float(plain[token]) * factor)
            self.assertGreater(bounded, 0, key)

    def test_ratios_compare_with_what_was_drawn_if_other_weights_drew_it(self):
        objective = Objective("grpo", {}, off_policy=True)
        self.assertEqual((objective.needs_old(), objective.needs_behaviour()), (False, True))
        totals = Totals(1, 3, 0.0)
        drawn = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
        now = drawn + 0.1
        [(found, *_)] = objective.weigh([(Signal(1.0, behaviour=drawn), now)], totals)
        torch.testing.assert_close(found, (now - drawn).exp() / 3)
        far = Objective("grpo", {"kl": 0.1})
        signal = Signal(1.0, drawn, drawn)
        [(_, dropped, clipped)] = far.weigh([(signal, now + 0.2)], totals)
        self.assertEqual((dropped, clipped), (3, 0))

    def test_what_it_does_not_know_is_refused(self):
        for name, settings, expected in [
            ("ppo", {}, "objective 'ppo' is unknown"),
            ("grpo", {"mask": 2.0}, "no setting 'mask'"),
            ("dr_grpo", {}, "'max_tokens' is missing"),
        ]:
            with self.assertRaisesRegex(Refused, expected):
                Objective(name, settings)
