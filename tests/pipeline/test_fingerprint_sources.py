"""Fingerprints of data sets: sources within other objects, and long lists of samples."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset

from stallfree.pipeline.compose import Compose
from stallfree.pipeline.fingerprint import fingerprint
from warm import Interpreter


class Source:
    """Speaks for its records in `fingerprint()`, and not for its pipeline."""

    def __init__(self, records: str, *steps: Any) -> None:
        self.records = records
        self.pipeline = Compose(steps)

    def __len__(self) -> int:
        return 3

    def fingerprint(self) -> str:
        return self.records


def up(value: int) -> int:
    return value + 1


def down(value: int) -> int:
    return value - 1


def test_a_source_within_another_object_counts_with_its_pipeline() -> None:
    made = [
        ConcatDataset([Source("a")]),
        ConcatDataset([Source("b")]),
        ConcatDataset([Source("a", up)]),
        ConcatDataset([Source("a", down)]),
        ConcatDataset([Source("a", up), Source("a", down)]),
        ConcatDataset([Source("a", down), Source("a", up)]),
    ]
    keys = [fingerprint(thing) for thing in made]
    assert len(set(keys)) == len(keys)
    assert fingerprint(ConcatDataset([Source("a", up)])) == keys[2]


MANY = 1000
LISTS: list[list[Any]] = [
    *(list(range(MANY)), list(range(1, MANY + 1)), list(map(float, range(MANY))), list(map(str, range(MANY)))),
    *([str(number).encode() for number in range(MANY)], [bool(number % 2) for number in range(MANY)]),
    *([number % 2 for number in range(MANY)], [np.int64(number) for number in range(MANY)], [None] * MANY),
    *([""] * MANY, [()] * MANY, [(number, number) for number in range(MANY)]),
    *([(number, float(number)) for number in range(MANY)], [[number, number] for number in range(MANY)]),
    *([(number,) for number in range(MANY)], [(number,) if number else (number, number) for number in range(MANY)]),
    *([(str(number), number) for number in range(MANY)], [(str(number), str(number)) for number in range(MANY)]),
    *([((number, number), number) for number in range(MANY)], [*range(MANY - 1), "999"], ["1", "23", *["x"] * MANY]),
    *(["12", "3", *["x"] * MANY], ["\ud800"] * MANY, [1 << 20000, *range(MANY)], [float("nan")] * MANY, [0.0] * MANY),
    [-0.0] * MANY,
]


def test_long_lists_that_differ_have_other_fingerprints() -> None:
    things = [*LISTS, *map(tuple, LISTS)]
    assert len({fingerprint(thing) for thing in things}) == len(things)


def test_equal_long_lists_have_the_same_fingerprint() -> None:
    for given in LISTS:
        again = pickle.loads(pickle.dumps(given))
        assert fingerprint(again) == fingerprint(given)
        assert fingerprint([again, 1]) == fingerprint([given, 1])


class Row(NamedTuple):
    file: str
    label: int


@dataclass
class Sample:
    file: str
    label: int


MANY_ITEMS: list[Any] = [
    {str(number): number for number in range(MANY)},
    {number: str(number) for number in range(MANY)},
    [{"file": str(number), "label": number} for number in range(MANY)],
    [Row(str(number), number) for number in range(MANY)],
    [Sample(str(number), number) for number in range(MANY)],
    [Path(str(number)) for number in range(MANY)],
    list(np.arange(MANY)),
    {str(number) for number in range(MANY)},
    np.array([str(number) for number in range(MANY)], object),
]


@pytest.mark.parametrize("items", MANY_ITEMS, ids=lambda items: type(items).__name__)
def test_many_items_take_no_calls_of_functions_for_each(items: Any) -> None:
    calls = 0

    def count(frame: object, event: str, what: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        found = fingerprint(items)
    finally:
        sys.setprofile(None)
    assert calls < (40 if isinstance(items, list) else 3) * MANY
    assert fingerprint(pickle.loads(pickle.dumps(items))) == found


MAPPED = """
import resource, sys
import numpy as np
from stallfree.pipeline.fingerprint import fingerprint

array = np.memmap(sys.argv[1], np.uint16, "r")
views = [array, array[1:], np.asarray(array)[1:], array.reshape(2, -1), array[::2], {"a": [array]}]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(*map(fingerprint, views))
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
"""


def test_a_mapped_file_takes_little_memory(tmp_path: Path, interpreter: Interpreter) -> None:
    """It is represented by its name, time and size, and by a sample of its bytes."""
    path = tmp_path / "tokens.bin"
    with open(path, "wb") as file:
        file.truncate(3 << 30)
    found = []
    for change in (False, True):
        if change:
            os.utime(path, (1, 1))
        done = interpreter.run(MAPPED, str(path))
        assert done.code == 0, done.err
        found.append(done.out.split())
    assert len({each for run in found for each in run}) == 12


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_large_values_take_no_memory(kind: Any) -> None:
    """Such as a view that repeats one number."""
    value = kind([1.0])
    views = [
        np.broadcast_to(value, 10**12) if kind is np.array else value.expand(10**12) for value in (value, value + 1)
    ]
    assert fingerprint(views[0]) == fingerprint(views[0]) != fingerprint(views[1])
