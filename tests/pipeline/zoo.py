"""The zoo: transforms and data sets of all kinds, in every cache. Judges whether a cache freezes what is random.

An entry that is random is *frozen* when its samples stay the same over epochs where they differ without a cache. An
entry that is deterministic is *cached* when its values are right and its code does not run in the second and third
epoch. The same loader with as many workers, without a cache, is what each way is compared with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import zoo_datasets  # noqa: F401
import zoo_draws  # noqa: F401
import zoo_libraries  # noqa: F401
import zoo_steady  # noqa: F401
import zoo_unseen  # noqa: F401
from zoo_entry import Entry
from zoo_ways import PLAIN, WAYS, Epochs, Looked, Task, make, quiet, sealed, stacks

MOST_CALLS = 0.1
"""Calls per sample and epoch after the first, up to which an entry counts as cached."""

FEWEST_CHANGES = 4
"""An entry with fewer changes without a cache is too still to be judged as a whole."""


@dataclass(frozen=True)
class Verdict:
    """What one way did to one entry.

    Attributes:
        entry, way: which.
        what: "fresh" or "frozen" for a random entry; "cached" or "anew" for a steady one, or the steady step before a
            random one; "right" for one that may be either; "refused" for a data set that was not taken; "wrong" for
            other values; "error".
        note: details.
    """

    entry: Entry
    way: str
    what: str
    note: str = ""


def judge(entry: Entry, ways: Sequence[str] = tuple(WAYS)) -> list[Verdict]:
    """The verdicts on `entry` in `ways`. A random entry with a steady first step has two for each."""
    verdicts: list[Verdict] = []
    known: dict[str, Epochs] = {}
    with quiet():
        right = _samples(entry)
        stacked = stacks(right)
        expected = [sealed(sample) for sample in right]
        for way in ways:
            like, read = WAYS[way]
            if _left_out(entry, way, like):
                continue
            task = Task(entry, stacked, 1, entry.kind == "steady" or entry.prefix)
            try:
                if entry.kind == "random" and like not in known:
                    known[like] = PLAIN[like](task).epochs
                looked = read(task)
            except Exception as error:
                verdicts.append(Verdict(entry, way, "error", f"{type(error).__name__}: {error}"))
                continue
            verdicts += _verdicts(entry, way, looked, known.get(like, []), expected)
    return verdicts


def _left_out(entry: Entry, way: str, like: str) -> bool:
    """Whether nothing can be said of `entry` in this way, or another way says the same."""
    if entry.local and (not like.endswith(" 0") or way == "shared"):
        return True
    if way == "shared" and entry.kind != "random":
        return True
    return entry.records is None and way.startswith("prepared, ")


def _samples(entry: Entry) -> list[Any]:
    """All samples, read once from a fresh one."""
    data = make(entry).plain
    return [data[id] for id in range(len(data))]


def _verdicts(entry: Entry, way: str, looked: Looked, plain: Epochs, expected: list[Any]) -> Iterable[Verdict]:
    if looked.refused:
        yield Verdict(entry, way, "refused", looked.refused)
        return
    if entry.kind == "random":
        problem = frozen(entry, plain, looked.epochs)
        yield Verdict(entry, way, "frozen" if problem else "fresh", problem)
    elif any(epoch != expected for epoch in looked.epochs):
        yield Verdict(entry, way, "wrong", "values differ from those without a cache")
        return
    if entry.kind == "either":
        yield Verdict(entry, way, "right")
    if looked.calls >= 0:
        note = f"{looked.calls:.2f} calls per sample" + (f"; {looked.decision}" if looked.decision else "")
        yield Verdict(entry, way, "anew" if looked.calls > MOST_CALLS else "cached", note)


def frozen(entry: Entry, plain: Epochs, found: Epochs) -> str:
    """How the samples of three epochs are frozen, in words; "" if they are not. `plain` are those without a cache."""
    ids = [id for id in range(len(plain[0])) if entry.draws(id)]
    there, here = _changes(plain, ids), _changes(found, ids)
    if there >= FEWEST_CHANGES and here < (1 if entry.base else there / 2):
        return f"{here} changes between epochs, {there} without a cache"
    if entry.base is not None:
        bases = [sealed(entry.base(record)) for record in _records(entry)]
        stuck = [id for id in ids if len({epoch[id] for epoch in found}) == 1 and found[0][id] != bases[id]]
        return f"what was drawn for {stuck[:5]} is kept" if stuck else ""
    usual, stuck = _still(plain, ids), _still(found, ids)
    spare = 4 * math.sqrt(len(usual)) + 3 if entry.coarse else 0
    if len(stuck) > len(usual) + spare:
        return f"{len(stuck)} samples stay the same, such as {stuck[:5]}; {len(usual)} without a cache"
    return ""


def _changes(epochs: Epochs, ids: list[int]) -> int:
    """Samples that differ from one epoch to the next."""
    return sum(before[id] != after[id] for before, after in itertools.pairwise(epochs) for id in ids)


def _still(epochs: Epochs, ids: list[int]) -> list[int]:
    """Samples that are the same in all epochs."""
    return [id for id in ids if all(epoch[id] == epochs[0][id] for epoch in epochs)]


def _records(entry: Entry) -> list[Any]:
    return entry.records() if entry.records is not None else entry.make().records
