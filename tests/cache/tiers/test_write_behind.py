"""The queue of writes in the background: what waits for room, and what is lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stallfree.cache.tiers import write_behind
from stallfree.cache.tiers.write_behind import WriteBehind
from stallfree.pipeline.codec import encode

SIZE = 4096


class Target:
    """Stores ids when the gate is open."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.entered, self.gate = threading.Event(), threading.Event()
        self.flags = np.zeros(100, np.uint8)

    def write(self, ids: np.ndarray, records: list[Any]) -> None:
        self.entered.set()
        assert self.gate.wait(60)
        self.ids += ids.tolist()


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """With room for two records on their way."""
    monkeypatch.setattr(write_behind, "QUEUE_BYTES", 2 * SIZE)
    target = Target()
    yield target
    target.gate.set()


def add(queue: WriteBehind, *ids: int) -> int:
    return queue.add(np.array(ids), [encode(bytes(SIZE)) for _ in ids])


def test_what_finds_no_room_is_not_taken(target: Target) -> None:
    queue = WriteBehind(target.write, target.flags, target="the target")
    assert add(queue, 1) == 1
    assert target.entered.wait(60)
    with pytest.warns(RuntimeWarning, match="samples arrive faster than the target can store them"):
        assert add(queue, 2, 3, 4) == 1
    assert np.flatnonzero(target.flags).tolist() == [1, 2]
    target.gate.set()
    queue.flush()
    assert add(queue, 5, 6, 7) == 3  # more than there is room for, as the queue is empty
    queue.close()
    assert (target.ids, target.flags.any()) == ([1, 2, 5, 6, 7], False)


def test_a_sample_may_be_changed_when_it_was_added(target: Target) -> None:
    written: list[bytes] = []

    def write(ids: np.ndarray, records: list[Any]) -> None:
        target.write(ids, records)
        written.extend(arrays[0].tobytes() for _, arrays in records)

    queue = WriteBehind(write, target.flags, target="the target")
    body = np.ones(SIZE, np.uint8)
    assert queue.add(np.array([1]), [encode(body)]) == 1
    assert target.entered.wait(60)
    body[:] = 0
    target.gate.set()
    queue.close()
    assert written == [b"\1" * SIZE]


@pytest.mark.parametrize("failing", [[1], [2], [3], [1, 3], [1, 2, 3]])
def test_flush_raises_the_first_error_of_writing(
    failing: list[int], target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever of the writes failed; and it is logged once, as a worker process never flushes."""

    def write(ids: np.ndarray, records: list[Any]) -> None:
        assert target.gate.wait(60)
        if ids[0] in failing:
            raise ZeroDivisionError(ids[0])

    queue = WriteBehind(write, target.flags, target="the target")
    assert add(queue, 1) == add(queue, 2) == 1
    target.gate.set()
    with contextlib.suppress(ZeroDivisionError) if failing[0] < 3 else contextlib.nullcontext():
        queue.flush()
        assert failing[0] == 3
    add(queue, 3)
    with pytest.raises(ZeroDivisionError, match="3") if 3 in failing else contextlib.nullcontext():
        queue.flush()
    queue.flush()
    assert not target.flags.any()
    [record] = caplog.records
    assert "could not be written to the target" in record.getMessage()
    assert "ZeroDivisionError" in record.getMessage()
    queue.close()
