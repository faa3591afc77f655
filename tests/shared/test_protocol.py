"""What members and conductor say to each other arrives as it was sent; fixed layouts, and never pickle."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stallfree as sf
from stallfree.loader.messages import EMPTY, FAILED, READY, Result
from stallfree.shared import protocol
from stallfree.shared.protocol import (
    NOWHERE,
    Hello,
    Kind,
    answer,
    body_of,
    kind_of,
    pack_error,
    request,
    result_of,
    unpack_answer,
    unpack_hello,
    unpack_note,
    unpack_request,
)

int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
kinds = st.sampled_from(list(Kind))


@given(
    pid=int32, job=st.binary(min_size=16, max_size=16), rank=int32, ranks=int32, position=int64, catchup=st.booleans(),
    name=st.text(st.characters(codec="utf-8"), max_size=50),
)  # fmt: skip
def test_hello(**fields: Any) -> None:
    sent = Hello(**fields)
    message = bytearray(sent.pack())
    assert kind_of(message) == Kind.HELLO
    assert unpack_hello(message) == sent


@pytest.mark.parametrize("name", ["x" * 10_000, "é" * 10_000, "\ud800" * 10_000, "😀" * 67])
def test_a_long_or_broken_name_is_cut(name: str) -> None:
    """File names need not be text."""
    message = bytearray(Hello(1, bytes(16), 0, 1, NOWHERE, False, name).pack())
    assert len(message) < 300
    assert 10 < len(unpack_hello(message).name) <= 200


def test_a_member_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Hello(77, bytes(16), 0, 1, NOWHERE, False, "train.py")
    monkeypatch.setattr(protocol, "VERSION", 9)
    message = bytearray(told.pack())
    monkeypatch.undo()
    words = r"^process 77 speaks version 9 of the group's protocol, this one 1: install the same release for all$"
    with pytest.raises(sf.StallfreeError, match=words):
        unpack_hello(message)


@given(kind=kinds, serial=int32, number=int64, taken=int64)
def test_requests(kind: Kind, serial: int, number: int, taken: int) -> None:
    message = bytearray(request(kind, serial, number, taken))
    assert kind_of(message) == kind
    assert unpack_request(message) == (kind, serial, number, taken)


@given(kind=kinds, serial=int64, number=int64, extra=int32, body=st.binary(max_size=50))
def test_answers(kind: Kind, serial: int, number: int, extra: int, body: bytes) -> None:
    message = bytearray(answer(kind, serial, number, extra, body))
    assert kind_of(message) == kind
    assert unpack_answer(message) == (kind, serial, number, extra)
    assert bytes(body_of(message)) == body


def test_kinds_are_all_different() -> None:
    assert len({int(kind) for kind in Kind}) == len(Kind.__members__) == 13


@pytest.mark.parametrize("status", [READY, EMPTY, FAILED])
def test_a_batch(status: int) -> None:
    sent = Result(status, 1, 2, 3, 400, ids=np.array([5, 6]), note=b"why", hits=7, prep_seconds=0.5)
    message = bytearray(answer(Kind.BATCH, 8, 9, 10, b"".join(bytes(part) for part in sent.pack())))
    assert unpack_answer(message) == (Kind.BATCH, 8, 9, 10)
    got = result_of(message)
    assert (got.status, got.token, got.number, got.slot, got.size, got.hits) == (status, 1, 2, 3, 400, 7)
    assert (got.ids.tolist(), got.note, got.prep_seconds) == ([5, 6], b"why", 0.5)


# --- errors -----------------------------------------------------------------------------------------------------------


@given(message=st.text(), where=st.text(), trace=st.text(), id=int64)
def test_errors_of_samples(message: str, where: str, trace: str, id: int) -> None:
    error, told = unpack_note(pack_error(sf.SampleError(message, id=id, where=where), trace))
    assert type(error) is sf.SampleError
    assert (str(error), error.id, error.where, told) == (message, id, where, trace)


def test_errors_of_workers() -> None:
    error, _ = unpack_note(bytearray(pack_error(sf.WorkerError("killed", ids=[3, 4]), "")))
    assert type(error) is sf.WorkerError
    assert (str(error), error.ids) == ("killed", [3, 4])


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (sf.InputError("give another"), sf.InputError, "give another"),
        (sf.StallfreeError("plain"), sf.StallfreeError, "plain"),
        (sf.WaitError("too long"), sf.WaitError, "too long"),
        (ValueError("no"), ValueError, "ValueError: no"),
        (KeyError("k"), KeyError, "KeyError: 'k'"),
        (None, sf.StallfreeError, "the trace"),
    ],
)
def test_other_errors(error: BaseException | None, kind: type, said: str) -> None:
    got, trace = unpack_note(pack_error(error, "the trace"))
    assert isinstance(got, kind)
    assert isinstance(got, sf.StallfreeError)
    assert (str(got), trace) == (said, "the trace")


@pytest.mark.parametrize("id", [np.int64(3), (1, 2), Path("x"), None, "three", object()])
def test_an_error_may_hold_anything(id: Any) -> None:
    """Data sets raise errors of their own with ids of their own."""
    error, _ = unpack_note(pack_error(sf.SampleError("mine", id=id, where=Path("/data")), ""))  # type: ignore[arg-type]
    assert type(error) is sf.SampleError
    assert (str(error), error.where) == ("mine", "/data")


class Attack:
    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


def test_nothing_is_unpickled() -> None:
    """What comes over a socket is data. (That in a slot is the conductor's own.)"""
    with pytest.raises(ValueError, match=r"."):
        unpack_note(pickle.dumps(Attack()))
    assert "pickle" not in vars(protocol)
