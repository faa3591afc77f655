"""The zoo: transforms and data sets of all kinds, in every cache. Judges whether a cache freezes what is random.

A random entry is *frozen* if samples stay the same in epochs in which they should differ. A steady one is *cached* if
its values are right, and its code runs for no sample after the first epoch.
"""

import contextlib
import io
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

import frozen as fr
import stallfree as sf

COUNT, MANY = 48, 256
"""Samples of an entry, and of one that draws for one in a hundred."""

Records = Callable[[], list[Any]]
Register = Callable[..., None]


def rows(count: int = COUNT) -> list[Any]:
    """Arrays of 64 values, the first of which is the id."""
    made = [np.random.default_rng(id).normal(0, 1, 64).astype(np.float32) for id in range(count)]
    for id, row in enumerate(made):
        row[0] = id
    return made


many = partial(rows, MANY)


def tensors() -> list[Any]:
    return [torch.from_numpy(row) for row in rows()]


def first_is_short() -> list[Any]:
    """Arrays of which the first has 64 values and the others have 200."""
    return [np.random.default_rng(id).normal(0, 1, 200 if id else 64).astype(np.float32) for id in range(COUNT)]


def labelled() -> list[Any]:
    """Pairs of an array and a label of 0 to 9."""
    return [(row, id % 10) for id, row in enumerate(rows())]


def named() -> list[Any]:
    return [{"id": id, "x": row} for id, row in enumerate(rows())]


def images() -> list[Any]:
    return [np.random.default_rng(id).integers(0, 256, (24, 32, 3), np.uint8) for id in range(COUNT)]


def encoded() -> list[Any]:
    """Pictures as PNG files."""
    files = [io.BytesIO() for _ in range(COUNT)]
    for file, pixels in zip(files, images(), strict=True):
        Image.fromarray(pixels).save(file, "PNG")
    return [file.getvalue() for file in files]


def texts() -> list[Any]:
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "2024-03-01", "17:05", "Ünïcode"]
    draw = np.random.default_rng(0)
    return [f"{id} " + " ".join(draw.choice(words, 12)) for id in range(COUNT)]


@dataclass(frozen=True)
class Entry:
    """A transform or a data set, and what is known about it."""

    name: str
    kind: str  # "random": epochs differ. "steady": they do not. "either": they do not, but that cannot be known
    make: Callable[[], Any]  # a fresh step, list of steps, or data set
    records: Records | None = rows  # what the first step gets; None for a data set
    draws: Callable[[int], bool] = lambda id: True  # whether the sample of an id differs in each epoch
    base: Callable[[Any], Any] | None = None  # gives the sample without a draw, if others are drawn for in each epoch
    local: bool = False  # state is kept from sample to sample, so that it is judged without workers only
    prefix: str = ""  # qualified name of the function of a steady first step, which should be cached


ENTRIES: list[Entry] = []


def entry(kind: str, records: Records | None = rows, **details: Any) -> Register:
    """Registers a factory of an entry. Its name is None afterwards: steps that use such a name must not lead here."""

    def registered(make: Callable[[], Any], name: str = "") -> None:
        assert (name or make.__name__) not in {entry.name for entry in ENTRIES}
        ENTRIES.append(Entry(name or make.__name__, kind, make, records, **details))

    return registered


random_entry, steady_entry = partial(entry, "random"), partial(entry, "steady")
either_entry = partial(entry, "either", local=True)


def of_step(register: Register) -> Register:
    """Registers a step without state."""
    return lambda step: register(lambda: step, step.__name__)


def of_steps(register: Register, **steps: Any) -> None:
    """Registers steps without state by name."""
    for name, step in steps.items():
        register(lambda step=step: step, name)


def _torch_loader(dataset: Any, workers: int) -> Any:
    return torch.utils.data.DataLoader(dataset, 16, num_workers=workers, collate_fn=list)


def _in_window(data: Any, step: Any, workers: int) -> fr.Epochs | None:
    """In a smart cache whose window is the whole data set and stays."""
    options: dict[str, Any] = {"cache_num": len(data), "replace_rate": 0, "shuffle": False, "name": fr.unique()}
    try:
        window = sf.SmartCacheDataset(data, step, seed=1, **options)
    except sf.InputError:
        assert step is None
        return None
    with contextlib.closing(window):
        return fr.read(_torch_loader(window, 0))


def _in_group(data: Any, workers: int) -> Any:
    return sf.SharedLoader(data, group=fr.unique(), batch_size=16, seed=1, collate_fn=list)


WAYS: dict[str, fr.Way] = {
    **fr.WAYS, "prepared": lambda data, step, workers: fr.cached(data, workers, transform=step, form="prepared"),
    "torch's loader": lambda data, step, workers: fr.cached(data, workers, _torch_loader, transform=step),
    "window": _in_window, "group": lambda data, step, workers: fr.cached(data, workers, _in_group, transform=step),
}  # fmt: skip


@contextlib.contextmanager
def counted(name: str) -> Iterator[Counter[str]]:
    """Counts the calls of entries' code, or of a function of that qualified name, by the interpreter's profiler.

    Nothing of it is in the entry, so it cannot change how the entry is judged.
    """
    counts = Counter[str]()

    def is_entrys(frame: Any) -> bool:
        return frame is not None and "/tests/pipeline/zoo_" in frame.f_code.co_filename

    def note(frame: Any, event: str, argument: Any) -> None:
        called = frame.f_code.co_qualname
        if event == "call" and (called.endswith(name) if name else is_entrys(frame) > is_entrys(frame.f_back)):
            counts[called] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def judge(entry: Entry, way: str, workers: int = 0) -> str:
    """What is wrong with an entry in one way; "" if nothing is."""
    made = entry.make()
    steps = None if entry.records is None else sf.Compose(made if isinstance(made, list) else [made])
    data = made if entry.records is None else fr.Rows(entry.records())
    counts = (entry.kind == "steady" or entry.prefix) and not way.startswith(("auto", "group"))  # whose workers fork
    with warnings.catch_warnings(), counted(entry.prefix) if counts else contextlib.nullcontext() as calls:
        warnings.simplefilter("ignore")
        epochs = WAYS[way](data, steps, workers)
    if epochs is None:
        return "refused" if entry.kind == "steady" else ""
    if entry.kind == "random":
        kept = frozen(entry, epochs)
        if kept:
            return f"{len(kept)} samples are frozen, such as {kept[:5]}"
    else:
        fresh = fr.augmented(data, steps)
        if any(epoch != [fr.sealed(fresh[id]) for id in range(len(data))] for epoch in epochs):
            return "other values than without a cache"
    if calls is not None:
        assert calls or not entry.prefix or workers, "no call was seen"
        often = {name: count for name, count in calls.items() if count > 3 * len(data)}  # 7 epochs, and looks in one
        return f"it runs anew: {often}" if often else ""
    return ""


def frozen(entry: Entry, epochs: fr.Epochs) -> list[int]:
    """The ids of samples that are the same in all late epochs, though they should not be."""
    ids = [id for id in range(len(epochs[0])) if entry.draws(id)]
    if entry.base is None:
        return fr.frozen(epochs, ids)
    records = entry.make().records if entry.records is None else entry.records()
    bases = [fr.sealed(entry.base(record)) for record in records]
    drawn = any(epoch[id] != bases[id] for epoch in epochs[fr.LATE :] for id in ids)
    return [id for id in fr.frozen(epochs, ids) if epochs[-1][id] != bases[id]] if drawn else ids
