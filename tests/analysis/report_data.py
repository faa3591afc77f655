"""Reports made by hand, for tests."""

from __future__ import annotations

from typing import Any

import torch

from stallfree.analysis.job import Job
from stallfree.analysis.placement import Placement
from stallfree.analysis.report import Remedy, Report, Sizes, make_report
from stallfree.analysis.stopwatch import Rate


class Samples:
    """A data set of that length, which nobody reads."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, id: int) -> int:
        return id


class Source(Samples):
    """One that separates fetch from prep, as far as a report can tell."""


def make(
    rates: dict[str, float | None],
    *,
    parted: bool = True,
    cache: Any = None,
    remedy: Remedy | None = None,
    placement: Placement | None = None,
    measured: dict[str, Rate] | None = None,
    **changed: Any,
) -> Report:
    """A report with these rates: G, P, P_hit, S, C, cold, warm; 10,000 samples of 50,000 bytes."""
    source = Source(10_000)
    job = Job(source, print, 32, 4, torch.device("cpu"), source=source)
    if not parted:
        from stallfree.sources.mapped import MapSource

        job.source = MapSource(source)
    for name, value in changed.items():
        setattr(job, name, value)
    default: dict[str, float | None] = {"G": 1000, "P": 2000, "S": 250, "C": 50_000, "copy": None}
    merged = {**default, **rates}
    merged.setdefault("P_hit", merged["P"])
    merged.setdefault("cold", 250)
    merged.setdefault("warm", 1000)
    found = {
        name: Rate(None, note="not measured here")
        if value is None
        else Rate(float(value), 0.99 * value, 1.01 * value, 100)
        for name, value in merged.items()
    }
    found |= measured or {}
    sizes = Sizes(50_000.0 if parted else None, 50_000.0, 150_528.0)
    return make_report(job, found, sizes, 0.0, cache, [], remedy, placement)
