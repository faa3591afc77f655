"""Errors received from other jobs have their original type if it is loaded, and are never unpickled."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stallfree as sf
from stallfree.errors import lock_held, text_of
from stallfree.ipc.remote import pack_plain_error, unpack_plain_error

int64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=30)
@given(message=st.text(), where=st.text(), trace=st.text(), id=int64)
def test_errors_of_samples(message: str, where: str, trace: str, id: int) -> None:
    error, told = unpack_plain_error(pack_plain_error(sf.SampleError(message, id=id, where=where), trace))
    assert type(error) is sf.SampleError
    assert (text_of(error), error.id, error.where, told) == (message, id, where, trace)


def test_errors_of_workers() -> None:
    error, _ = unpack_plain_error(bytearray(pack_plain_error(sf.WorkerError("killed", ids=[3, 4]), "")))
    assert type(error) is sf.WorkerError
    assert (text_of(error), error.ids, error.page) == ("killed", [3, 4], "worker-died")


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
    got, trace = unpack_plain_error(pack_plain_error(error, "the trace"))
    assert isinstance(got, kind)
    assert isinstance(got, sf.StallfreeError)
    assert (text_of(got), trace) == (said, "the trace")


def test_the_page_of_an_error_goes_along() -> None:
    own = ValueError("of a user, with a page of its own")
    own.page = 3  # type: ignore[attr-defined]
    for error, page in ((lock_held("busy"), "lock-held"), (own, "")):
        got, _ = unpack_plain_error(pack_plain_error(error, ""))
        assert got.page == page


@pytest.mark.parametrize("id", [np.int64(3), (1, 2), Path("x"), None, "three", object()])
def test_an_error_may_hold_anything(id: Any) -> None:
    """Data sets may raise their own errors with their own ids."""
    error, _ = unpack_plain_error(pack_plain_error(sf.SampleError("mine", id=id, where=Path("/data")), ""))  # type: ignore[arg-type]
    assert type(error) is sf.SampleError
    assert (text_of(error), error.where) == ("mine", "/data")


class Attack:
    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


def test_nothing_is_unpickled() -> None:
    """Bytes from a socket are data, never pickles; slots are written by the coordinator of the same user."""
    with pytest.raises(ValueError, match=r"."):
        unpack_plain_error(pickle.dumps(Attack()))
