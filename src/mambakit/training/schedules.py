"""The learning rate of each step, as a share of its peak."""

import math

from mambakit.training.settings import TrainSettings


def share_of_peak(step: int, settings: TrainSettings) -> float:
    """For step number `step`, from 0: up in a line, then half a cosine down, or ("wsd") level and down in a line.

    "constant" stays up.
    """
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    if settings.schedule == "constant":
        return 1.0
    floor = settings.floor
    if settings.schedule == "cosine":
        done = (step - settings.warmup) / max(settings.steps - settings.warmup, 1)
        return floor + (1 - floor) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
    falling = max(round(settings.decay * settings.steps), 1)
    left = min((settings.steps - step) / falling, 1.0)
    return floor + (1 - floor) * max(left, 0.0)
