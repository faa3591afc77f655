"""`stallfree replay`: what policies would do with a trace of ids, without data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from stallfree.cli._output import writable
from stallfree.errors import InputError
from stallfree.units import format_size

if TYPE_CHECKING:
    from stallfree.analysis.replay import EpochReplay, Replay

Array = npt.NDArray[Any]

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_FIGURES = ("hits", "misses", "storage_bytes", "evictions", "rejected")


def replay(
    capacity: Annotated[
        str,
        typer.Option(
            help="What the cache holds: a share such as 35%, samples, or with --sizes bytes such as 4GiB.",
            metavar="SIZE",
        ),
    ],
    policy: Annotated[
        str, typer.Option(help="One or more of minio, fifo, lru, lfu, random, importance, oracle.", metavar="NAMES")
    ] = "minio,lru,oracle",
    samples: Annotated[str | None, typer.Option(help="Make a trace of so many ids, such as 1.3M.", metavar="N")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of that trace.", show_default="10")] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            help="Its order: shuffle, sequential, or zipf: the kth most popular id comes 1/k as often as the first.",
            metavar="NAME",
            show_default="shuffle",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of that order.")] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Take this trace instead: .npy (a row per epoch), .jsonl (a list of ids per line and epoch), or text "
            "(an id per line, an empty line between epochs).",
            metavar="FILE",
        ),
    ] = None,
    sizes: Annotated[Path | None, typer.Option(help="Bytes of each sample: .npy, by id.", metavar="FILE")] = None,
    scores: Annotated[
        Path | None,
        typer.Option(help="For importance: .npy, a number by id, or a row of them for each epoch.", metavar="FILE"),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Ids that are looked up at a time, as the loader does.")] = 256,
    per_epoch: Annotated[bool, typer.Option("--per-epoch", help="Show every epoch.")] = False,
    json_: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.", metavar="FILE")
    ] = None,
) -> None:
    """Replay policies over a trace of ids, without data: what each would hit, read and evict, epoch by epoch."""
    from stallfree.analysis import replay as run

    names = _policies(policy, scores)
    writable(json_)
    ids = _trace(trace, samples, epochs, sampler, seed)
    bytes_of = None if sizes is None else _array(sizes, "--sizes")
    importance = None if scores is None else _array(scores, "--scores")
    room = _capacity(capacity, ids, bytes_of)
    console = Console(highlight=False)
    found = []
    with _progress(console, names, sum(map(len, ids))) as advance:
        for name in names:
            arguments: dict[str, Any] = {"sizes": bytes_of, "scores": importance if name == "importance" else None}
            found.append(
                run(ids, policy=name, capacity=room, batch_size=batch_size, on_epoch=advance(name), **arguments)
            )
    console.print(_table(found, per_epoch, bytes_of is not None))
    console.print("Each miss is one storage operation.", style="dim")
    if advice := _advice(ids, found, bytes_of is not None):
        console.print(Text(advice), soft_wrap=not console.is_terminal)
    if json_ is not None:
        _write(json_, found, {"capacity": capacity, "batch_size": batch_size}, console)


# -- what was asked for -----------------------------------------------------------------------------------------------


def _policies(text: str, scores: Path | None) -> list[str]:
    from stallfree.cache.policies import make_policy

    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        make_policy(name)
    if "importance" in names and scores is None:
        raise InputError("--policy importance needs the importance of each id: give --scores FILE.npy")
    if "importance" not in names and scores is not None:
        raise InputError(f"--scores is for --policy importance, not for {', '.join(names)}: leave it out")
    return names


def _count(text: str, name: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([kmg]?)\s*", text.lower())
    count = int(float(match[1]) * _FACTORS[match[2]]) if match else 0
    if count < 1:
        raise InputError(f"{name}={text!r} is no number of samples: give one such as 50000 or 1.3M")
    return count


def _capacity(text: str, ids: list[Array], sizes: Array | None) -> int | str:
    """As `stallfree.replay` takes it."""
    if text.strip().endswith("%") or sizes is not None:
        return text
    count, all_ids = _count(text, "--capacity"), max((int(epoch.max()) + 1 for epoch in ids if len(epoch)), default=0)
    if count > all_ids:
        raise InputError(
            f"--capacity={text!r} is more than all {all_ids:,} samples: give fewer, a share of at most 100%, or bytes "
            "and --sizes"
        )
    return count


# -- traces -----------------------------------------------------------------------------------------------------------


def _trace(
    path: Path | None, samples: str | None, epochs: int | None, sampler: str | None, seed: int
) -> list[npt.NDArray[np.int64]]:
    if path is None:
        if samples is None:
            raise InputError("there is no trace: give --samples, such as 1.3M, or a recorded one with --trace")
        return _made(_count(samples, "--samples"), 10 if epochs is None else epochs, sampler or "shuffle", seed)
    making = {"--samples": samples, "--epochs": epochs, "--sampler": sampler}
    if given := [name for name, value in making.items() if value is not None]:
        raise InputError(f"--trace is taken as it is: leave out {', '.join(given)}, or --trace")
    found = _read(path)
    if not sum(map(len, found)):
        raise InputError(f"--trace {path} holds no ids: give a file with one at least")
    for epoch in found:
        if epoch.ndim != 1 or (len(epoch) and (epoch.dtype.kind not in "iu" or epoch.min() < 0)):
            raise InputError(f"--trace {path} must hold ids, integers of 0 or more; it holds {_bad(epoch)}")
    return [epoch.astype(np.int64, copy=False) for epoch in found]


def _bad(epoch: Array) -> str:
    if epoch.ndim == 1 and epoch.dtype.kind in "iu":
        return f"the id {int(epoch.min())}"
    return f"{epoch.ndim} dimensions of {epoch.dtype}" if epoch.ndim != 1 else f"{epoch.dtype}"


def _read(path: Path) -> list[Array]:
    if path.suffix == ".npy":
        array = _array(path, "--trace")
        return list(array) if array.ndim == 2 else [array]
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--trace {path} cannot be read: {_why(error)}. Give a text file, .jsonl or .npy") from error
    if path.suffix == ".jsonl":
        return [_listed(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    epochs, start = [], 0
    for end in [*(at for at, line in enumerate(lines) if not line.strip()), len(lines)]:
        if end > start:
            epochs.append(_numbers(path, lines[start:end], start))
        start = end + 1
    return epochs


def _listed(path: Path, number: int, line: str) -> Array:
    try:
        array = np.array(json.loads(line))
    except (ValueError, OverflowError):
        array = np.empty((0, 0))
    if array.ndim != 1 or (len(array) and (array.dtype.kind != "i" or array.min() < 0)):
        raise _no_ids(path, number, line)
    return array if len(array) else array.astype(np.int64)


def _numbers(path: Path, lines: Sequence[str], before: int) -> Array:
    try:
        array = np.array(list(map(int, lines)), np.int64)
    except (ValueError, OverflowError):
        array = np.array([-1])
    if array.min() < 0:
        number, line = next(
            (number, line) for number, line in enumerate(lines, before + 1) if not re.fullmatch(r"\s*\d{1,18}\s*", line)
        )
        raise _no_ids(path, number, line)
    return array


def _no_ids(path: Path, number: int, line: str) -> InputError:
    return InputError(f"--trace {path}, line {number} holds {line.strip()!r:.60}: ids are integers of 0 or more")


def _array(path: Path, name: str) -> Array:
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{name} {path} cannot be read ({_why(error)}): give a file of NumPy (.npy)") from error


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _made(samples: int, epochs: int, sampler: str, seed: int) -> list[npt.NDArray[np.int64]]:
    from stallfree.cache.memory.limits import free_memory
    from stallfree.sampling.plans import make_plan

    if sampler not in ("shuffle", "sequential", "zipf"):
        raise InputError(f"--sampler={sampler!r} is unknown: use shuffle, sequential or zipf")
    size, free = samples * (epochs + 8) * 16, free_memory()
    if size > free:
        raise InputError(
            f"{epochs} epochs of {samples:,} ids take about {format_size(size)} of memory, and {format_size(free)} are "
            "free: give fewer --samples or --epochs"
        )
    if sampler == "zipf":
        rng = np.random.default_rng(seed)
        popular, steps = rng.permutation(samples), np.cumsum(1 / np.arange(1, samples + 1))
        return [popular[np.searchsorted(steps, rng.random(samples) * steps[-1], "right")] for _ in range(epochs)]
    shuffle = sampler == "shuffle"
    return [make_plan(samples, shuffle=shuffle, seed=seed, epoch=epoch).ids for epoch in range(epochs)]


# -- what is shown ----------------------------------------------------------------------------------------------------


@contextmanager
def _progress(
    console: Console, names: Sequence[str], total: int
) -> Iterator[Callable[[str], Callable[[EpochReplay], None]]]:
    """Bars on a terminal, nothing elsewhere. Gives what makes the hook of a policy."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = {name: progress.add_task(name, total=total, start=False) for name in names}

        def hook(name: str) -> Callable[[EpochReplay], None]:
            progress.start_task(tasks[name])
            return lambda epoch: progress.advance(tasks[name], epoch.accesses)

        yield hook


def _table(found: Sequence[Replay], per_epoch: bool, sized: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("policy", "epoch"):
        table.add_column(heading, no_wrap=True)
    for heading in ("hits", "misses", "hit ratio", *(["read"] if sized else []), "evictions", "rejected"):
        table.add_column(heading, justify="right", no_wrap=heading != "hit ratio")
    for outcome in found:
        for at, (name, epochs) in enumerate(_rows(outcome.epochs, per_epoch)):
            count = 1 if name == "all" else len(epochs)
            sums = [sum(getattr(epoch, figure) for epoch in epochs) / count for figure in _FIGURES]
            hits, misses, read, evictions, rejected = sums
            table.add_row(
                outcome.policy if at == 0 else "",
                name,
                *(f"{hits:,.0f}", f"{misses:,.0f}", f"{hits / max(1, hits + misses):.2%}"),
                *([format_size(read)] if sized else []),
                *(f"{evictions:,.0f}", f"{rejected:,.0f}"),
                end_section=name == "all",
            )
    return table


def _rows(epochs: Sequence[EpochReplay], every: bool) -> Iterator[tuple[str, Sequence[EpochReplay]]]:
    """The name of each row, and the epochs whose mean it shows; of the last one the sum."""
    last = len(epochs)
    if every or last <= 2:
        for number, epoch in enumerate(epochs, 1):
            yield str(number), [epoch]
    else:
        yield "1", epochs[:1]
        yield f"2-{last} mean", epochs[1:]
    if last > 1:
        yield "all", epochs


def _advice(ids: Sequence[Array], found: Sequence[Replay], sized: bool) -> str:
    """What is true of any trace whose epochs ask for every sample once."""
    samples = max(int(epoch.max(initial=-1)) for epoch in ids) + 1
    if sized or len(ids) < 2 or any(len(epoch) != samples or (np.bincount(epoch) != 1).any() for epoch in ids):
        return ""
    room = found[0].capacity_items
    return (
        f"Each epoch asks for every sample once. So no policy hits more than the {room:,} samples "
        f"({room / samples:.2%}) that were there when it began. From the second epoch on, minio hits as many, and it "
        "evicts nothing."
    )


def _write(path: Path, found: Sequence[Replay], asked: dict[str, Any], console: Console) -> None:
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
    try:
        path.write_text(json.dumps({"format": "stallfree-replay", "version": 1, **asked, "policies": policies}) + "\n")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {_why(error)}. Give another file") from error
    console.print(Text(f"wrote {path}"), soft_wrap=True)
