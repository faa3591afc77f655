"""The benefit of a cache for a job: how many times longer its epoch would take without the cache.

Jobs on one cache weight the importance of a sample by this factor (`sampling.plans.jobs`). A job whose steps take
longer than its samples gains nothing, however slow the storage is.
"""

from __future__ import annotations

import math

from stallfree.errors import InputError
from stallfree.units import parse_whole


def benefit(step_seconds: float, hit_seconds: float, miss_seconds: float, *, workers: int, batch_size: int) -> float:
    """The predicted ratio of the epoch time without the cache to that with all samples in the cache.

    Samples are fetched and prepared while the device trains, so a batch takes the longer of the two times.

    Args:
        step_seconds: training time of a batch.
        hit_seconds: time of one worker for a sample in the cache, prep included.
        miss_seconds: the same for a sample that is not in the cache, fetch included.
        workers: number of workers. 0 counts as 1: the training process, whose threads fetch during the steps.
        batch_size: samples per batch.

    Raises `InputError` for a time that is negative or not finite, and if step and hits both take zero time.
    """
    parse_whole(workers, "workers", 0), parse_whole(batch_size, "batch_size", 1)
    for name, value in (("step", step_seconds), ("hit", hit_seconds), ("miss", miss_seconds)):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise InputError(f"{name}_seconds={value!r}: give a time in seconds, 0 or more")
    if step_seconds == hit_seconds == 0:
        raise InputError("step_seconds and hit_seconds are 0: give times that were measured")
    share = batch_size / max(1, workers)
    return max(step_seconds, share * miss_seconds) / max(step_seconds, share * hit_seconds)
