"""`stallfree replay`: simulates eviction policies over shuffled epochs, without data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from stallfree.cli._output import JsonFile, console, table, writable, write_json
from stallfree.errors import InputError, argument_conflict, run_too_large
from stallfree.units import format_size, parse_size

if TYPE_CHECKING:
    from stallfree.analysis.replay import EpochReplay, Replay
    from stallfree.datasets.epoch_source import Plan

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
    from stallfree.analysis.render import progress_bar
    from stallfree.analysis.replay import replay as run

    names = _policies(policy)
    writable(json)
    count = _count(samples, "--samples")
    room = capacity if capacity.strip().endswith("%") else _count(capacity, "--capacity")
    if isinstance(room, int) and room > count:
        raise InputError(f"--capacity={capacity!r} is more than all {count:,} samples: give fewer, or a share")
    plans = _plans(count, epochs)
    found = []
    with progress_bar() as progress:
        task = progress.add_task("", total=len(names) * epochs)

        def advance(_: EpochReplay) -> None:
            progress.advance(task)

        for name in names:
            progress.update(task, description=name)
            found.append(run(plans, policy=name, capacity=room, batch_size=batch_size, on_epoch=advance))
    out = console(json)
    out.out(_result(found))
    if epochs > 1:
        held = found[0].capacity_items
        out.out(
            f"A policy without evictions hits {held / count:.2%} from the second epoch on ({held:,} samples); none "
            "hits more: each epoch reads every sample once."
        )
    out.print(_table(found, per_epoch))
    write_json(json, _figures(found, capacity, batch_size), out)


def _result(found: Sequence[Replay]) -> str:
    """The policy with the fewest misses, compared with the others."""
    best, *others = sorted(found, key=lambda one: (one.policy == "oracle", one.total.misses, one.total.evictions))
    total, parts = best.total, []
    for other in others:
        change = other.total.misses / total.misses - 1
        amount = f"{abs(change):.0%} {'more' if change > 0 else 'fewer'}" if abs(change) >= 0.005 else "as many"
        parts.append(f"{other.policy} {amount}" + " (it knows the future)" * (other.policy == "oracle"))
    end = f"; {', '.join(parts)}" if parts else ""
    return f"{best.policy} reads {total.misses:,} of {total.accesses:,} samples from storage{end}"


def _policies(text: str) -> list[str]:
    from stallfree.cache.policies import make_policy

    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        make_policy(name)
    if "importance" in names:
        raise argument_conflict(
            "--policy importance needs the importance of each id: use stallfree.replay(..., scores=...)"
        )
    return names


def _count(text: str, name: str) -> int:
    count = parse_size(text) if re.fullmatch(r"\s*\d+(\.\d+)?[kmg]?\s*", text.lower()) else 0
    if count < 1:
        raise InputError(f"{name}={text!r} is no number of samples: give one such as 50000 or 1.3M")
    return count


def _plans(samples: int, epochs: int) -> list[Plan]:
    from stallfree.cache.capacity import free_memory
    from stallfree.datasets.epoch_source import make_plan

    size, free = samples * (epochs + 8) * 16, free_memory()
    if size > free:
        raise run_too_large(
            f"{epochs} epochs of {samples:,} ids take about {format_size(size)} of memory, and {format_size(free)} are "
            "free: give fewer --samples or --epochs"
        )
    return [make_plan(samples, shuffle=True, seed=0, epoch=epoch) for epoch in range(epochs)]


def _table(found: Sequence[Replay], per_epoch: bool) -> Table:
    shown = table(None, ("policy", "epoch"), ("hits", "misses", "hit ratio", "evictions", "rejected"))
    for outcome in found:
        for at, (name, epochs) in enumerate(_rows(outcome.epochs, per_epoch)):
            count = 1 if name == "all" else len(epochs)
            hits, misses, evictions, rejected = (
                sum(getattr(epoch, figure) for epoch in epochs) / count for figure in _FIGURES
            )
            shown.add_row(
                outcome.policy if at == 0 else "",
                name,
                *(f"{hits:,.0f}", f"{misses:,.0f}", f"{hits / (hits + misses):.2%}"),
                *(f"{evictions:,.0f}", f"{rejected:,.0f}"),
                end_section=name == "all",
            )
    return shown


def _rows(epochs: Sequence[EpochReplay], every: bool) -> Iterator[tuple[str, Sequence[EpochReplay]]]:
    """The name of each row, and the epochs that it averages; the last row is the sum."""
    last = len(epochs)
    if every or last <= 2:
        for number, epoch in enumerate(epochs, 1):
            yield str(number), [epoch]
    else:
        yield "1", epochs[:1]
        yield f"2-{last} mean", epochs[1:]
    if last > 1:
        yield "all", epochs


def _figures(found: Sequence[Replay], capacity: str, batch_size: int) -> dict[str, Any]:
    """The content of the `--json` file."""

    def figures(epoch: EpochReplay) -> dict[str, Any]:
        return {**asdict(epoch), "storage_operations": epoch.misses, "hit_ratio": epoch.hit_ratio}

    policies = [
        {
            "policy": outcome.policy,
            "capacity_items": outcome.capacity_items,
            "epochs": [figures(epoch) for epoch in outcome.epochs],
            "total": figures(outcome.total),
        }
        for outcome in found
    ]
    return {
        "format": "stallfree-replay",
        "version": 1,
        "capacity": capacity,
        "batch_size": batch_size,
        "policies": policies,
    }
