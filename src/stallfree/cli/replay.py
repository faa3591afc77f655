"""`stallfree replay`: simulates eviction policies over shuffled epochs, without data."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Annotated, Any

import typer

from stallfree.cli._output import JsonFile, show, writable
from stallfree.errors import InputError, argument_conflict, run_too_large
from stallfree.units import format_size, parse_size

_FIGURES = ("hits", "misses", "evictions", "rejected")


def replay(
    capacity: Annotated[str, typer.Option(help="Size of the cache: a share such as 35%, or samples.", metavar="SIZE")],
    samples: Annotated[str, typer.Option(help="Samples of the data set, such as 1.3M.", metavar="N")],
    policy: Annotated[
        str, typer.Option(help="One or more of minio, fifo, lru, lfu, random, oracle.", metavar="NAMES")
    ] = "minio,lru,oracle",
    epochs: Annotated[int, typer.Option(min=1, help="Shuffled epochs.", metavar="N")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per batch.", metavar="N")] = 256,
    per_epoch: Annotated[bool, typer.Option("--per-epoch", help="Show every epoch.")] = False,
    json: JsonFile = None,
) -> None:
    """Compare eviction policies over shuffled epochs, without data.

    `stallfree.replay` replays a trace, samples of several sizes, and importances.

    Example: stallfree replay --samples 1.3M --capacity 35%
    """
    from stallfree.analysis.render import Table, as_text, progress_bar
    from stallfree.analysis.replay import replay as run
    from stallfree.cache.capacity import free_memory
    from stallfree.cache.policies import make_policy
    from stallfree.datasets.epoch_source import make_plan

    names = [make_policy(name.strip()).name for name in dict.fromkeys(policy.split(","))]
    if "importance" in names:
        raise argument_conflict("--policy importance needs the importance of each id: use stallfree.replay(scores=...)")
    writable(json)
    count = _count(samples, "--samples")
    size = capacity if capacity.strip().endswith("%") else _count(capacity, "--capacity")
    if isinstance(size, int) and size > count:
        raise InputError(f"--capacity={capacity!r} is more than all {count:,} samples: give fewer, or a share")
    needed, free = count * (epochs + 8) * 16, free_memory()
    if needed > free:
        size, advice = format_size(needed), "give fewer --samples or --epochs"
        raise run_too_large(f"{epochs} epochs of {count:,} ids take {size}, {format_size(free)} are free: {advice}")
    plans = [make_plan(count, shuffle=True, seed=0, epoch=epoch) for epoch in range(epochs)]
    results = []
    with progress_bar() as progress:
        task = progress.add_task("", total=len(names) * epochs)
        for name in names:
            progress.update(task, description=name)
            on_epoch = lambda _: progress.advance(task)  # noqa: E731
            results.append(run(plans, policy=name, capacity=size, batch_size=batch_size, on_epoch=on_epoch))
    rows = [row for result in results for row in _rows(result, per_epoch)]
    table = Table("", ("policy, epochs", "hits", "misses", "hit ratio", "evictions", "rejected"), rows)
    policies = [
        {"policy": result.policy, "capacity_items": result.capacity_items}
        | {"epochs": list(map(_json, result.epochs)), "total": _json(result.total)}
        for result in results
    ]
    data = {"format": "stallfree-replay", "version": 1, "capacity": capacity, "batch_size": batch_size}
    show(f"{_result(results)}\n{as_text([table])}", data | {"policies": policies}, json)


def _count(text: str, name: str) -> int:
    count = parse_size(text) if re.fullmatch(r"\s*\d+(\.\d+)?[kmg]?\s*", text.lower()) else 0
    if count < 1:
        raise InputError(f"{name}={text!r} is no number of samples: give one such as 50000 or 1.3M")
    return count


def _result(results: Sequence[Any]) -> str:
    """The policy with the fewest misses, compared with the others."""
    best, *others = sorted(results, key=lambda one: (one.policy == "oracle", one.total.misses, one.total.evictions))
    parts = []
    for other in others:
        change = other.total.misses / best.total.misses - 1
        amount = f"{abs(change):.0%} {'more' if change > 0 else 'fewer'}" if abs(change) >= 0.005 else "as many"
        parts.append(f"{other.policy} {amount}" + " (it knows the future)" * (other.policy == "oracle"))
    reads = f"{best.policy} reads {best.total.misses:,} of {best.total.accesses:,} samples from storage"
    return "; ".join([reads, *([", ".join(parts)] if parts else [])])


def _rows(result: Any, every: bool) -> Iterator[list[str]]:
    """The first epoch, the mean of the later ones, and the sum; or every epoch."""
    epochs, last = result.epochs, len(result.epochs)
    groups = {str(number): [epoch] for number, epoch in enumerate(epochs, 1)}
    if last > 2 and not every:
        groups = {"1": [epochs[0]], f"2-{last} mean": list(epochs[1:])}
    if last > 1:
        groups["all"] = [result.total]
    for name, group in groups.items():
        hits, misses, evictions, rejected = (fmean(getattr(epoch, key) for epoch in group) for key in _FIGURES)
        figures = f"{hits:,.0f}", f"{misses:,.0f}", f"{hits / (hits + misses):.2%}", f"{evictions:,.0f}"
        yield [f"{result.policy}: {name}", *figures, f"{rejected:,.0f}"]


def _json(epoch: Any) -> dict[str, Any]:
    return {**asdict(epoch), "storage_operations": epoch.misses, "hit_ratio": epoch.hit_ratio}
