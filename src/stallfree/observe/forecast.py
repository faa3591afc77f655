"""Forecasts what `DataLoader(cache="auto")` would reach in a script that was timed with another loader."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from stallfree.autotune.auto_cache import AutoCache
from stallfree.loader.arguments import FREE_SHARE
from stallfree.platform import cpu_count


def forecast(dataset: Any, workers: int, step: float, step_cpu: float) -> dict[str, Any] | None:
    """The rate of a training loop over `dataset` from the second epoch on, measured on some samples for some seconds.

    Args:
        dataset: a map-style data set.
        workers: number of worker processes of its loader; 0: chosen automatically.
        step: seconds of the training loop for one sample.
        step_cpu: CPU seconds of the training process for one sample.

    Returns:
        "cached": what is cached, in words; "workers": their number; "rate": samples/s. None if nothing can be cached,
        or no cache is faster.
    """
    step = max(step, 1e-9)
    printed = io.StringIO()  # of the data set, which is not to be seen more often than without the forecast
    try:
        with redirect_stdout(printed), redirect_stderr(printed), warnings.catch_warnings(record=True):
            choice, cached = AutoCache(dataset, FREE_SHARE, workers or None).forecast(1 / step)
    except Exception:  # also one of the data set
        return None
    if choice.share is None:
        return None
    shared = choice.workers / choice.prep + step_cpu  # CPU seconds for one sample of workers and training process
    return {"cached": cached, "workers": choice.workers, "rate": min(choice.rate, 1 / step, cpu_count() / shared)}
