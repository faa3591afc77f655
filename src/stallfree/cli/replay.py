"""`stallfree replay`: simulates eviction policies over shuffled epochs, without data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from stallfree.cli._output import writable
from stallfree.errors import InputError, argument_conflict, run_too_large
from stallfree.units import format_size

if TYPE_CHECKING:
    from stallfree.analysis.replay import EpochReplay, Replay
    from stallfree.sampling.plans import Plan

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_FIGURES = ("hits", "misses", "evictions", "rejected")


def replay(
    capacity: Annotated[
        str, typer.Option(help="What the cache holds: a share such as 35%, or samples.", metavar="SIZE")
    ],
    samples: Annotated[str, typer.Option(help="Samples of the data set, such as 1.3M.", metavar="N")],
    policy: Annotated[
        str, typer.Option(help="One or more of minio, fifo, lru, lfu, random, oracle.", metavar="NAMES")
    ] = "minio,lru,oracle",
    epochs: Annotated[int, typer.Option(min=1, help="Shuffled epochs.")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Ids that are looked up at a time, as the loader does.")] = 256,
    per_epoch: Annotated[bool, typer.Option("--per-epoch", help="Show every epoch.")] = False,
    json_: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.", metavar="FILE")
    ] = None,
) -> None:
    """Replay policies over shuffled epochs, without data: what each would hit, read and evict, epoch by epoch.

    `stallfree.replay` does so with a trace of your own, with samples of several sizes, and with importances.
    """
    from stallfree.analysis import replay as run

    names = _policies(policy)
    writable(json_)
    count = _count(samples, "--samples")
    room = capacity if capacity.strip().endswith("%") else _count(capacity, "--capacity")
    if isinstance(room, int) and room > count:
        raise InputError(f"--capacity={capacity!r} is more than all {count:,} samples: give fewer, or a share")
    plans = _plans(count, epochs)
    console = Console(highlight=False)
    with _progress(console, names, count * epochs) as advance:
        found = [
            run(plans, policy=name, capacity=room, batch_size=batch_size, on_epoch=advance(name)) for name in names
        ]
    console.print(_table(found, per_epoch))
    console.print("Each miss is one storage operation.", style="dim")
    if epochs > 1:
        held = found[0].capacity_items
        text = (
            f"Each epoch asks for every sample once. So no policy hits more than the {held:,} samples "
            f"({held / count:.2%}) that were there when it began. From the second epoch on, minio hits as many, and it "
            "evicts nothing."
        )
        console.print(text, soft_wrap=not console.is_terminal)
    if json_ is not None:
        json_.write_text(json.dumps(_figures(found, capacity, batch_size)) + "\n")
        console.print(Text(f"wrote {json_}"), soft_wrap=True)


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
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([kmg]?)\s*", text.lower())
    count = int(float(match[1]) * _FACTORS[match[2]]) if match else 0
    if count < 1:
        raise InputError(f"{name}={text!r} is no number of samples: give one such as 50000 or 1.3M")
    return count


def _plans(samples: int, epochs: int) -> list[Plan]:
    from stallfree.cache.memory.limits import free_memory
    from stallfree.sampling.plans import make_plan

    size, free = samples * (epochs + 8) * 16, free_memory()
    if size > free:
        raise run_too_large(
            f"{epochs} epochs of {samples:,} ids take about {format_size(size)} of memory, and {format_size(free)} are "
            "free: give fewer --samples or --epochs"
        )
    return [make_plan(samples, shuffle=True, seed=0, epoch=epoch) for epoch in range(epochs)]


@contextmanager
def _progress(
    console: Console, names: Sequence[str], total: int
) -> Iterator[Callable[[str], Callable[[EpochReplay], None]]]:
    """Progress bars, on a terminal only. Yields a function that creates the hook of a policy."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = {name: progress.add_task(name, total=total, start=False) for name in names}

        def hook(name: str) -> Callable[[EpochReplay], None]:
            progress.start_task(tasks[name])
            return lambda epoch: progress.advance(tasks[name], epoch.accesses)

        yield hook


def _table(found: Sequence[Replay], per_epoch: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("policy", "epoch"):
        table.add_column(heading, no_wrap=True)
    for heading in ("hits", "misses", "hit ratio", "evictions", "rejected"):
        table.add_column(heading, justify="right", no_wrap=heading != "hit ratio")
    for outcome in found:
        for at, (name, epochs) in enumerate(_rows(outcome.epochs, per_epoch)):
            count = 1 if name == "all" else len(epochs)
            hits, misses, evictions, rejected = (
                sum(getattr(epoch, figure) for epoch in epochs) / count for figure in _FIGURES
            )
            table.add_row(
                outcome.policy if at == 0 else "",
                name,
                *(f"{hits:,.0f}", f"{misses:,.0f}", f"{hits / (hits + misses):.2%}"),
                *(f"{evictions:,.0f}", f"{rejected:,.0f}"),
                end_section=name == "all",
            )
    return table


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
