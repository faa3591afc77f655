"""The summary of a timed script as text.

As `loops.py`, this file is loaded without the rest of stallfree.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SMALL_SHARE = 0.05
"""Share of the time below which stalls count as small."""


def text(found: dict[str, Any]) -> str:
    """The summary as text of 80 columns: the result, the advice, the loaders."""
    total, loaders = found["total"], found["loaders"]
    head = f"stallfree: {found['target']} waited for data {total['stall_share']:.1%} of the time of its loops"
    lines = [
        "",
        head,
        _advice(found),
        "",
        _line("passes", "batches", "samples", "first", "waited", "between", "stalled"),
    ]
    for row in loaders:
        batch = "" if row["batch_size"] is None else f", batch {row['batch_size']}"
        alike = "" if row["loaders"] == 1 else f" ({row['loaders']} alike)"
        lines.append(f"  {row['dataset']}{batch}, {_workers(row['num_workers'])}{alike}, iterated at {row['where']}")
        lines.append(_cells(row))
    if len(loaders) > 1:
        lines += ["  total", _cells(total)]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> str:
    samples = "?" if row["samples"] is None else f"{row['samples']:,}"
    seconds = [f"{row[f'{name}_seconds']:.2f} s" for name in ("first", "waited", "between")]
    return _line(f"{row['passes']:,}", f"{row['batches']:,}", samples, *seconds, f"{row['stall_share']:.1%}")


def _line(*cells: str) -> str:
    return "".join(f"{cell:>11}" for cell in cells)


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _advice(found: dict[str, Any]) -> str:
    """One or two sentences of advice."""
    total, forecast = found["total"], found.get("forecast")
    if total["stall_share"] < SMALL_SHARE:
        return "Next: nothing, data arrive in time; `stallfree analyze` shows how much faster the device may get."
    whole = total["first_seconds"] + total["waited_seconds"] + total["between_seconds"]
    starting = [row for row in found["loaders"] if _starting(row) > SMALL_SHARE * whole]
    seconds = sum(map(_starting, starting))
    advice = "`stallfree analyze` shows whether fetching or preparing is too slow, and what would end these waits."
    if forecast:
        rate, now = forecast["rate"], forecast["now"]
        return (
            f"Next: give stallfree.DataLoader the arguments of the DataLoader at {forecast['where']}, and "
            f'cache="auto": {forecast["cached"]}, {_workers(forecast["workers"])}, about {rate:,.0f} samples/s from '
            f"the second epoch on in place of {now:,.0f} ({rate / now:.1f}x)."
        )
    if not starting:
        return f"Next: {advice}"
    places = ", ".join(row["where"] for row in starting)
    cure = (
        f"the workers of {places} are started again in each pass, which took {seconds:.1f} s in all: give the loader "
        "persistent_workers=True."
    )
    return f"Next: {cure}" + (f" Then {advice}" if total["waited_seconds"] >= SMALL_SHARE * whole else "")


def _starting(row: dict[str, Any]) -> float:
    """Seconds of the waits for first batches caused by the start of workers, which persistent workers avoid.

    A running worker would build its first batch in the time of a batch times the number of workers.
    """
    passes, later = row["passes"], row["batches"] - row["passes"]
    if passes < 2 or not row["num_workers"] or row["persistent_workers"]:
        return 0.0
    each = (row["waited_seconds"] + row["between_seconds"]) / later if later > 0 else 0.0
    again = (row["first_seconds"] / passes - each * row["num_workers"]) * (passes - 1)
    return max(0.0, float(again))
