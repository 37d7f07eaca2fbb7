"""Weighs the tokens of a step by a training objective, with the formulas of `services/objective`.
The loss of each token is multiplied by its weight, which is a constant for the gradient."""

import dataclasses
import math

import torch

from .errors import Refused

# Larger weights, before they are divided by a number of tokens or sequences, are clipped to this.
WEIGHT_MAX = 1e4

# The upper bounds of the classes of ratios that are counted, but for the last.
RATIO_BOUNDS = [0.5, 0.8, 0.95, 1.05, 1.25, 2.0]


@dataclasses.dataclass
class Signal:
    """What an objective knows of a sequence. Tensors have a value for each scored token, in nats:
    by the weights from which the training starts, by the reference, and by the engine and weights
    that drew the sequence."""

    advantage: float = 1.0
    old: torch.Tensor = None
    reference: torch.Tensor = None
    behaviour: torch.Tensor = None

    def drawn(self):
        """Returns the log-probabilities that a ratio compares with."""
        return self.behaviour if self.old is None else self.old


@dataclasses.dataclass
class Totals:
    """The counts over which the loss of a step is a mean, and the mean gain on the reference."""

    sequences: int
    tokens: int
    mean_gain: float


def _ignored(_settings, signal, now):
    return torch.full_like(now, signal.advantage)


def _probability(_settings, signal, now):
    return signal.advantage * now.exp()


def _clipped(settings, signal, now):
    return _clip(settings, signal.advantage, (now - signal.drawn()).exp())


def _clipped_sequence(settings, signal, now):
    ratio = (now - signal.drawn()).mean().exp()
    return _clip(settings, signal.advantage, ratio.expand_as(now))


def _clip(settings, advantage, ratio):
    if advantage > 0:
        clipped = ratio > 1 + settings["clip_high"]
    else:
        clipped = ratio < 1 - settings["clip_low"]
    return torch.where(clipped, torch.zeros_like(ratio), advantage * ratio)


def _truncated(settings, signal, now):
    return signal.advantage * (now - signal.drawn()).exp().clamp(max=settings["max_ratio"])


def _teacher(settings, signal, now):
    gap = settings["max_gap"] or math.inf
    return (signal.reference - now).clamp(-gap, gap)


# What the sum of the tokens' losses is divided by, besides the number of sequences.
_SUM, _MEAN, _LONGEST, _ALL_TOKENS = "sum", "mean", "longest", "all tokens"

_CLIP = {"clip_low": 0.2, "clip_high": 0.2}

# The rule, the divisor and the defaults of each objective of single sequences.
_SINGLE = {
    "ssd": (_ignored, _SUM, {}),
    "dft": (_probability, _SUM, {}),
    "raft_plus_plus": (_clipped, _MEAN, _CLIP),
    "reinforce_rej": (_clipped, _MEAN, _CLIP),
    "rloo": (_ignored, _SUM, {}),
    "grpo": (_clipped, _MEAN, _CLIP),
    "dr_grpo": (_clipped, _LONGEST, {**_CLIP, "max_tokens": None}),
    "dapo": (_clipped, _ALL_TOKENS, {"clip_low": 0.2, "clip_high": 0.28}),
    "gspo": (_clipped_sequence, _MEAN, {"clip_low": 3e-4, "clip_high": 4e-4}),
    "cispo": (_truncated, _ALL_TOKENS, {"max_ratio": 5.0}),
    "distillation": (_teacher, _ALL_TOKENS, {"max_gap": 0.0}),
}


def _dpo(settings, chosen, rejected):
    gains = [now.sum() - signal.reference.sum() for signal, now in (chosen, rejected)]
    beta = settings["beta"]
    weight = beta * torch.sigmoid(-beta * (gains[0] - gains[1]))
    return weight + settings["nll"] / len(chosen[1]), -weight


def _simpo(settings, chosen, rejected):
    (_, better), (_, worse) = chosen, rejected
    beta = settings["beta"]
    margin = beta * (better.mean() - worse.mean()) - settings["gamma"]
    weight = beta * torch.sigmoid(-margin)
    return weight / len(better), -weight / len(worse)


def _orpo(settings, chosen, rejected):
    means = [now.mean() for _, now in (chosen, rejected)]
    left = [(-mean.expm1()).clamp(min=torch.finfo(torch.float64).eps) for mean in means]
    odds = [mean - rest.log() for mean, rest in zip(means, left)]
    weight = settings["lambda"] * torch.sigmoid(odds[1] - odds[0])
    better = (1 + weight / left[0]) / len(chosen[1])
    return better, -weight / (left[1] * len(rejected[1]))


_PAIRS = {
    "dpo": (_dpo, {"beta": 0.1, "nll": 0.0}),
    "simpo": (_simpo, {"beta": 2.5, "gamma": 1.375}),
    "orpo": (_orpo, {"lambda": 0.1}),
}

_KTO = {"beta": 0.1, "desirable": 1.0, "undesirable": 1.0, "min_reward": 0.5}


# Bounds of exp(old - behaviour), by which weights are multiplied; at most one is set.
_CORRECTIONS = ("truncate_tokens", "truncate_sequences", "mask_tokens", "mask_sequences")

_COMMON = {"kl": 0.0, **dict.fromkeys(_CORRECTIONS, 0.0)}


class Objective:
    def __init__(self, name, settings, off_policy=False):
        if name == "kto":
            defaults = _KTO
        elif name in _PAIRS:
            defaults = _PAIRS[name][1]
        elif name in _SINGLE:
            defaults = _SINGLE[name][2]
        else:
            raise Refused(f"objective {name!r} is unknown to this trainer")
        self.name, self.settings = name, {**defaults, **_COMMON, **settings}
        unknown = sorted(set(self.settings) - set(defaults) - set(_COMMON))
        if unknown:
            raise Refused(f"objective {name}: this trainer has no setting {unknown[0]!r}")
        missing = [key for key, value in self.settings.items() if value is None]
        if missing:
            raise Refused(f"objective {name}: setting {missing[0]!r} is missing")
        # The sequences that belong together.
        self.unit = 2 if name in _PAIRS else 1
        self.off_policy = off_policy
        self.corrects = any(self.settings[key] > 0 for key in _CORRECTIONS)

    def _has_ratios(self):
        ratios = (_clipped, _clipped_sequence, _truncated)
        return self.name in _SINGLE and _SINGLE[self.name][0] in ratios

    def needs_old(self):
        ratios = self._has_ratios() and not self.off_policy
        return self.name == "kto" or self.corrects or ratios

    def needs_behaviour(self):
        return self.corrects or (self.off_policy and self._has_ratios())

    def uses_teacher(self):
        """Returns true if the reference is a teacher, whose values come with the examples."""
        return self.name == "distillation"

    def needs_reference(self):
        is_scored = self.settings["kl"] > 0 or self.name in ("dpo", "kto")
        return is_scored and not self.uses_teacher()

    def weigh(self, unit, totals):
        """Takes the signal and the present log-probabilities of a sequence, or of a better and a
        worse one. Returns for each the weights of its tokens, -dloss/dlogprob, the number of those
        that are 0 without a divergence, and of those that were beyond the largest one."""
        if self.name in _PAIRS:
            weights = _PAIRS[self.name][0](self.settings, *unit)
            weights = [weight.expand_as(now) for weight, (_, now) in zip(weights, unit)]
            divisors = [totals.sequences / 2] * 2
        elif self.name == "kto":
            weights, divisors = [self._weigh_kto(*unit[0], totals)], [totals.sequences]
        else:
            [(signal, now)] = unit
            rule, mean, _ = _SINGLE[self.name]
            weights, divisors = [rule(self.settings, signal, now)], [totals.sequences]
            divisors[0] *= {_MEAN: len(now), _LONGEST: self.settings.get("max_tokens")}.get(mean, 1)
            if mean == _ALL_TOKENS:
                divisors = [totals.tokens]
        pairs = zip(unit, weights, divisors)
        return [self._finish(*sequence, raw, divisor) for sequence, raw, divisor in pairs]

    def _weigh_kto(self, signal, now, totals):
        beta, passes = self.settings["beta"], signal.advantage > 0
        importance = self.settings["desirable" if passes else "undesirable"]
        gain = now.sum() - signal.reference.sum() - max(totals.mean_gain, 0.0)
        sign = 1.0 if passes else -1.0
        share = torch.sigmoid(sign * beta * gain)
        return (sign * importance * beta * share * (1 - share)).expand_as(now)

    def _correct(self, signal, weights):
        """Multiplies by exp(old - behaviour), truncated or masked."""
        apart = signal.old - signal.behaviour
        for key in _CORRECTIONS:
            most = self.settings[key]
            if most > 0:
                whole = key.endswith("sequences")
                ratio = apart.sum().exp().expand_as(apart) if whole else apart.exp()
                if key.startswith("truncate"):
                    return weights * ratio.clamp(max=most)
                return torch.where(ratio > most, torch.zeros_like(ratio), weights * ratio)
        return weights

    def _finish(self, signal, now, weights, divisor):
        if self.corrects:
            weights = self._correct(signal, weights)
        dropped = int((weights == 0).sum()) if signal.advantage != 0 else 0
        kl = self.settings["kl"]
        if kl > 0:
            weights = weights + kl * torch.expm1(signal.reference - now)
        bounded = weights.clamp(-WEIGHT_MAX, WEIGHT_MAX)
        return bounded / divisor, dropped, int((weights != bounded).sum())


class WeightReport:
    """Counts and sums over the tokens that an objective weighted. A ratio is exp(now - old)."""

    def __init__(self):
        self.tokens, self.dropped, self.clipped, self.referenced = 0, 0, 0, 0
        self.ratios = torch.zeros(len(RATIO_BOUNDS) + 1, dtype=torch.int64)
        self.ratio_sum, self.drift_sum, self.divergence_sum = 0.0, 0.0, 0.0

    def add_sequence(self, signal, now, dropped, clipped):
        self.tokens += len(now)
        self.dropped += dropped
        self.clipped += clipped
        drawn = signal.drawn()
        if drawn is not None:
            ratios = (now - drawn).exp()
            bounds = torch.tensor(RATIO_BOUNDS, dtype=ratios.dtype)
            classes = torch.bucketize(ratios, bounds, right=True)
            self.ratios += torch.bincount(classes, minlength=len(self.ratios))
            self.ratio_sum += float(ratios.sum())
            self.drift_sum += _divergence_sum(now, drawn)
        if signal.reference is not None:
            self.referenced += len(now)
            self.divergence_sum += _divergence_sum(now, signal.reference)

    def to_message(self):
        """Returns the checkpoint's `weighting`."""
        message = {"tokens": self.tokens, "dropped": self.dropped, "clipped": self.clipped}
        compared = int(self.ratios.sum())
        if compared:
            message["ratio"] = self.ratio_sum / compared
            message["drift"] = self.drift_sum / compared
            message["ratios"] = self.ratios.tolist()
        if self.referenced:
            message["divergence"] = self.divergence_sum / self.referenced
        return message


def _divergence_sum(now, other):
    """Estimates the KL divergence of the present weights from others, as a sum over tokens (k3)."""
    apart = other - now
    return float((torch.expm1(apart) - apart).sum())


class StepWeights:
    """The objective of a training, with the signal of each sequence."""

    def __init__(self, objective, signals):
        self.objective, self.signals = objective, signals
        # The tokens since it was last replaced.
        self.report = WeightReport()

    def totals(self, parts):
        """Counts the sequences and tokens of a step."""
        indices = [index for part in parts for index in part["indices"]]
        signals = [self.signals[index] for index in indices]
        gains = [
            float(signal.drawn().sum() - signal.reference.sum())
            for signal in signals
            if signal.drawn() is not None and signal.reference is not None
        ]
        tokens = sum(part["scored"] for part in parts)
        return Totals(len(indices), tokens, sum(gains) / max(len(gains), 1))

    def weigh_pass(self, part, losses, totals):
        """Returns the weights of the scored tokens of a pass, in order."""
        now = (-losses.detach()).to("cpu", torch.float64).split(part["lengths"])
        places = sorted(range(len(now)), key=lambda place: part["indices"][place])
        weights = [None] * len(now)
        for start in range(0, len(places), self.objective.unit):
            together = places[start : start + self.objective.unit]
            unit = [(self.signals[part["indices"][place]], now[place]) for place in together]
            for place, sequence, found in zip(together, unit, self.objective.weigh(unit, totals)):
                weights[place], *counts = found
                self.report.add_sequence(*sequence, *counts)
        return torch.cat(weights).to(losses.device, losses.dtype)
