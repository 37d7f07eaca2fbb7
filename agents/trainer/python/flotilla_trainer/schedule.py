"""The learning rate of each step, and the schedule of checkpoints."""

import math


def factor(step, steps, training):
    """Returns the share of the peak rate at `step`, which counts from 1. The schedule ends one step
    after the last, so that no step has a rate of 0."""
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


class CheckpointSchedule:
    """Decides which steps are saved: the last one, those of the order's interval, and the next one
    after `save_s` seconds. The first save is due after a tenth of that time. Without an interval,
    each third of the training is also saved if the previous save is old enough.

    A crash costs minutes, not the whole training. Each saved step is also evaluated, so saves that
    are due by time alone are far apart.
    """

    # Shares of save_s.
    FIRST = 1 / 10
    THIRD = 1 / 30

    def __init__(self, steps, save_every, save_s, now, any_saved):
        # An interval of all steps or more would only save the last step, which is always saved.
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
