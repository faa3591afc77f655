"""Formatting of figures and labels, shared by the text and the pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from stallfree.errors import file_unreadable

RATES = {
    "G": "training on ready batches",
    "P": "prep of samples in memory",
    "S": "storage, cold files",
    "C": "cache",
    "F": "fetch, out of S and C",
}
"""Labels of the rates, in display order."""

REPORT_KEYS = (
    "made",
    "versions",
    "machine",
    "job",
    "rates",
    "runs",
    "shares",
    "bottleneck",
    "advice",
    "curves",
    "notes",
)
"""Required keys of a report."""

SHARES = {"compute": "compute", "copy": "copy", "prep_stall": "prep stall", "fetch_stall": "fetch stall"}
"""The parts of an epoch's time, in display order."""

RUNS = {"cold": "first epoch, cold files", "warm": "all data in memory"}
"""The two runs of the real job."""

MISSING = "not measured"

Measured = Mapping[str, Any]
"""A rate with its interval: the keys `value`, `low`, `high`, `repeats` and `note`; the numbers are None if unknown."""


def expect(data: Any, form: str, keys: Iterable[str], place: str = "this") -> None:
    """Raise `InputError` unless `data`, from `place`, is of the format `form`, version 1, and has these keys."""
    if not isinstance(data, dict) or data.get("format") != form:
        given = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise file_unreadable(f"{place} is no {form} (its format is {given!r}): give what stallfree saved as one")
    if data.get("version") != 1:
        raise file_unreadable(
            f"{place} is a {form} of version {data.get('version')!r}, and version 1 can be read: "
            "make it again with this version of stallfree, or read it with the one that wrote it"
        )
    if absent := [key for key in keys if key not in data]:
        raise file_unreadable(
            f"{place} is a {form} and lacks {', '.join(absent)}: make it again, or undo the change in it"
        )


def number(value: float, width: float = 0.0) -> str:
    """`value` with three digits or, from a hundred on, without decimals: `"0.85"`, `"20.1"`, `"12,300"`.

    A narrow interval of this `width` gets up to two decimals more, so that its ends differ.
    """
    size = abs(value)
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    if width > 0:
        decimals = max(decimals, min(decimals + 2, -math.floor(math.log10(width))))
    return f"{value:,.{decimals}f}"


def rate(measured: Measured) -> str:
    """The value of a rate, or a text for a missing one."""
    return MISSING if measured["value"] is None else number(measured["value"], _width(measured))


def spread(measured: Measured) -> str:
    """The interval of a rate, `"800 to 825"`; empty if there is none."""
    if measured["low"] is None or measured["high"] is None:
        return ""
    width = _width(measured)
    return f"{number(measured['low'], width)} to {number(measured['high'], width)}"


def _width(interval: Measured) -> float:
    known = interval["low"] is not None and interval["high"] is not None
    return float(interval["high"] - interval["low"]) if known else 0.0


def no_advice(data: Mapping[str, Any]) -> str:
    """The reason why a report has no advice."""
    if any(measured.get("more") for group in ("rates", "runs") for measured in data[group].values()):
        return str(data["bottleneck"])
    return "Nothing: no change that was looked at makes this job faster."


def percent(share: float) -> str:
    """`share` of 1 as a percentage: `"38%"`, or `"0.4%"` below one."""
    return f"{share:.1%}" if 0 < share < 0.00995 else f"{share:.0%}"


def speed(value: float) -> str:
    """Bytes per second in decimal units: `"530 MB/s"`."""
    for unit in ("B/s", "kB/s", "MB/s"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.0f} GB/s" if value >= 999.5 else f"{value:.3g} GB/s"


def gain(factor: float) -> str:
    """A factor of throughput: `"1.42 times"`."""
    return f"{factor:.2f} times"


def job_line(data: Mapping[str, Any]) -> str:
    """The job in a line: data set, batch size, loader, device."""
    job = data["job"]
    workers = "no workers" if job["num_workers"] == 0 else plural(job["num_workers"], "worker")
    cached = f", {percent(job['cache_share'])} of the samples cached" if job["cache_share"] else ""
    return (
        f"{job['dataset']}, {plural(job['samples'], 'sample')}, batches of {job['batch_size']:,}, "
        f"{job['loader']} loader with {workers}, {job['device']}{cached}"
    )


def plural(count: int, word: str) -> str:
    """`"1 sample"`, `"3,670 samples"`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def machine_line(data: Mapping[str, Any]) -> str:
    """The machine and the time of a measurement."""
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    machine = data["machine"]
    memory = f", {machine['memory_bytes'] / 2**30:.1f} GiB" if machine.get("memory_bytes") else ""
    return f"{plural(machine['cpus'], 'CPU')}{memory}; {versions}; {data['made']}"
