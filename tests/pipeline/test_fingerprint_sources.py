"""Fingerprints of data sets: sources within other objects, and long lists of samples."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from stallfree.pipeline import Compose, OnItem, fingerprint, mark_random


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
    list(range(MANY)),
    list(range(1, MANY + 1)),
    list(map(float, range(MANY))),
    list(map(str, range(MANY))),
    [str(number).encode() for number in range(MANY)],
    [bool(number % 2) for number in range(MANY)],
    [number % 2 for number in range(MANY)],
    [np.int64(number) for number in range(MANY)],
    [None] * MANY,
    [""] * MANY,
    [()] * MANY,
    [(number, number) for number in range(MANY)],
    [(number, float(number)) for number in range(MANY)],
    [[number, number] for number in range(MANY)],
    [(number,) for number in range(MANY)],
    [(number,) if number else (number, number) for number in range(MANY)],
    [(str(number), number) for number in range(MANY)],
    [(str(number), str(number)) for number in range(MANY)],
    [((number, number), number) for number in range(MANY)],
    [*range(MANY - 1), "999"],
    ["1", "23", *["x"] * MANY],
    ["12", "3", *["x"] * MANY],
    ["\ud800"] * MANY,
    [1 << 20000, *range(MANY)],
    [float("nan")] * MANY,
    [0.0] * MANY,
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


def test_marks_elsewhere_in_the_process_do_not_count() -> None:
    class Slotted:
        __slots__ = ()

        def __call__(self, value: int) -> int:
            return value

    before = fingerprint(Compose([up])), fingerprint(Compose([])), fingerprint(OnItem(0, up))
    mark_random(Slotted())  # is noted in a table, as it takes no attributes
    assert (fingerprint(Compose([up])), fingerprint(Compose([])), fingerprint(OnItem(0, up))) == before
