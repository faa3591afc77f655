"""What an entry of the zoo is, and the records that entries start from."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

COUNT = 48
MANY = 256
"""Samples of an entry that draws for one in a hundred."""


@dataclass(frozen=True)
class Entry:
    """A transform or a data set, and what is known about it.

    Attributes:
        name: of the entry.
        kind: "random": epochs differ. "steady": they do not, and the output should be cached. "either": values are
            always the same within a job, but that cannot be known without doubt, so both answers are right.
        make: a fresh step, list of steps, or data set.
        records: what the first step gets. None for a data set.
        draws: whether the sample of an id differs in each epoch.
        base: what a record becomes when nothing is drawn, for entries that draw for few samples and not for the same
            ones in each epoch.
        coarse: whether two draws may be equal.
        local: whether state is kept from sample to sample in one process, so that it is judged without workers only.
        prefix: whether the first step is steady and should be cached, though the entry is random.
    """

    name: str
    kind: str
    make: Callable[[], Any]
    records: Callable[[], list[Any]] | None
    draws: Callable[[int], bool]
    base: Callable[[Any], Any] | None
    coarse: bool
    local: bool
    prefix: bool


ENTRIES: list[Entry] = []

Factory = Callable[[], Any]
Register = Callable[..., None]


def rows(count: int = COUNT) -> list[Any]:
    """Arrays of 64 values, the first of which is the id."""
    made = [np.random.default_rng(id).normal(0, 1, 64).astype(np.float32) for id in range(count)]
    for id, row in enumerate(made):
        row[0] = id
    return made


def many() -> list[Any]:
    """More of them."""
    return rows(MANY)


def tensors() -> list[Any]:
    """The same as tensors."""
    return [torch.from_numpy(row) for row in rows()]


def first_is_short() -> list[Any]:
    """Arrays of which the first has 64 values and the others have 200."""
    return [np.random.default_rng(id).normal(0, 1, 200 if id else 64).astype(np.float32) for id in range(COUNT)]


def labelled() -> list[Any]:
    """Pairs of an array and a label of 0 to 9."""
    return [(row, id % 10) for id, row in enumerate(rows())]


def named() -> list[Any]:
    """Dictionaries with an id and an array."""
    return [{"id": id, "x": row} for id, row in enumerate(rows())]


def images() -> list[Any]:
    """Pictures as arrays of 24 x 32 x 3 bytes."""
    return [np.random.default_rng(id).integers(0, 256, (24, 32, 3), np.uint8) for id in range(COUNT)]


def encoded() -> list[Any]:
    """Pictures as PNG files."""
    return [_png(pixels) for pixels in images()]


def texts() -> list[Any]:
    """Sentences."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "2024-03-01", "17:05", "Ünïcode"]
    draw = np.random.default_rng(0)
    return [f"{id} " + " ".join(draw.choice(words, 12)) for id in range(COUNT)]


def _png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def always(id: int) -> bool:
    """That every sample differs."""
    return True


def unchanged(record: Any) -> Any:
    """That a record stays as it is when nothing is drawn."""
    return record


def random_entry(
    records: Callable[[], list[Any]] | None = rows,
    *,
    draws: Callable[[int], bool] = always,
    base: Callable[[Any], Any] | None = None,
    coarse: bool = False,
    local: bool = False,
    prefix: bool = False,
) -> Register:
    """Registers a factory of something random."""
    return _register("random", records, draws, base, coarse, local, prefix)


def steady_entry(records: Callable[[], list[Any]] | None = rows) -> Register:
    """Registers a factory of something deterministic."""
    return _register("steady", records, always, None, False, False, False)


def either_entry(records: Callable[[], list[Any]] | None = rows) -> Register:
    """Registers a factory of something that may be treated as one or the other."""
    return _register("either", records, always, None, False, True, False)


def _register(kind: str, records: Any, *rest: Any) -> Register:
    """The name of a factory is None afterwards: steps that use an attribute of the same name must not lead here."""

    def registered(make: Factory, name: str = "") -> None:
        name = name or make.__name__
        if any(entry.name == name for entry in ENTRIES):
            raise ValueError(f"two entries are called {name}")
        ENTRIES.append(Entry(name, kind, make, records, *rest))

    return registered


def of_step(register: Register) -> Register:
    """Registers a step without state."""
    return lambda step: register(lambda: step, step.__name__)
