"""Reports made by hand, for tests."""

from typing import Any

import torch

from stallfree.analysis.measure import Rate
from stallfree.analysis.predict import Remedy
from stallfree.analysis.report import Report, make_report


def make(
    rates: dict[str, float | None],
    *,
    parted: bool = True,
    cache: Any = None,
    remedy: Remedy | None = None,
    placement: dict[str, Any] | None = None,
    measured: dict[str, Rate] | None = None,
    workers: int = 4,
) -> Report:
    """A report with these rates: G, P, P_miss, P_hit, S, C, cold, warm; 10,000 samples of 50,000 bytes."""
    job = {"dataset": "Source", "samples": 10_000, "batch_size": 32, "num_workers": workers}
    job |= {"loader": "stallfree" if parted else "torch", "parted": parted}
    job |= {"sample_bytes": 50_000.0 if parted else None, "record_bytes": 50_000.0}
    default: dict[str, float | None] = {"G": 1000, "P": 2000, "S": 250, "C": 50_000, "copy": None}
    merged = {**default, "cold": 250, "warm": 1000, **rates}
    merged = {"P_miss": merged["P"], "P_hit": merged["P"], **merged}
    all_rates = {
        name: Rate(None, note="not measured here") if value is None else Rate(float(value), 0.99 * value, 1.01 * value)
        for name, value in merged.items()
    } | (measured or {})
    return make_report(job, torch.device("cpu"), all_rates, cache, [], remedy=remedy, placement=placement)
