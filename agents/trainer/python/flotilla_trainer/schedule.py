"""The learning rate of each step, and which steps are saved."""

import math


def factor(step, steps, training):
    """Share of the peak rate; `step` counts from 1. The peak is reached by some step, and the
    schedule ends one step behind the last, so that none is wasted on a rate of 0."""
    warmup = max(math.ceil(training.warmup_ratio * steps), 1)
    if step <= warmup:
        return step / warmup
    progress = (step - warmup) / (steps - warmup + 1)
    left = {
        "CONSTANT": 1.0,
        "LINEAR": 1.0 - progress,
        "COSINE": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[training.schedule]
    return training.final_ratio + (1.0 - training.final_ratio) * left


class Cadence:
    """Which steps are saved: every so many if the order says, at the latest after `save_s`
    seconds, the first one soon, and at each third of a training that leaves it open.

    A crash may cost minutes, never the training. Each saved step is also evaluated, so what time
    alone calls for is far apart.
    """

    FIRST = 1 / 10
    THIRD = 1 / 30

    def __init__(self, steps, save_every, save_s, now, any_saved):
        # One that never comes before the end saves nothing.
        self.steps, self.every = steps, save_every if save_every < steps else 0
        self.save_s, self.saved_at, self.any_saved = save_s, now, any_saved

    def due(self, step, now):
        since = now - self.saved_at
        third = -(-self.steps // 3)
        due = (
            step == self.steps
            or (self.every > 0 and step % self.every == 0)
            or since >= self.save_s
            or (not self.any_saved and since >= self.save_s * self.FIRST)
            or (self.every == 0 and step % third == 0 and since >= self.save_s * self.THIRD)
        )
        if due:
            self.saved(now)
        return due

    def saved(self, now):
        self.saved_at, self.any_saved = now, True
