"""Tasks and results arrive complete and unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stallfree.loader.messages import (
    FORGET,
    PRIVATE,
    READY,
    WORK,
    Result,
    Task,
    forget_message,
    unpack_result,
    unpack_task,
)

int64 = st.integers(-(2**63), 2**63 - 1)


@given(token=int64, number=int64, slot=st.integers(-1, 2**31 - 1), epoch=int64, ids=st.lists(int64, max_size=5))
def test_tasks(token: int, number: int, slot: int, epoch: int, ids: list[int]) -> None:
    kind, task = unpack_task(Task(token, number, slot, epoch, np.array(ids, np.int64)).pack())
    assert kind == WORK
    assert (task.token, task.number, task.slot, task.epoch, task.ids.tolist()) == (token, number, slot, epoch, ids)


def test_forget() -> None:
    kind, task = unpack_task(forget_message(7))
    assert (kind, task.token) == (FORGET, 7)


@given(
    ids=st.lists(int64, max_size=5),
    note=st.binary(max_size=20),
    memory=st.one_of(st.none(), st.binary(min_size=1, max_size=100)),
    counts=st.tuples(*[st.integers(0, 2**63 - 1)] * 4),
    seconds=st.tuples(*[st.floats(0, 1e9)] * 2),
)
def test_results(ids: list[int], note: bytes, memory: bytes | None, counts: Any, seconds: Any) -> None:
    size = len(memory) if memory else 5
    private = None if memory is None else np.frombuffer(memory + b"beyond", np.uint8)
    sent = Result(
        READY if memory is None else PRIVATE, 1, 2, 3, size, *counts[:3], *seconds, counts[3],
        np.array(ids, np.int64), note, private,
    )  # fmt: skip
    got = unpack_result(bytearray(b"".join(sent.pack())))
    for name in ("status", "token", "number", "slot", "size", "hits", "misses", "storage_bytes", "skipped", "note"):
        assert getattr(got, name) == getattr(sent, name)
    assert (got.fetch_seconds, got.prep_seconds) == seconds
    assert got.ids.tolist() == ids
    assert memory is None or (got.memory is not None and got.memory.tobytes() == memory)
    assert (got.memory is None) == (memory is None)
