"""Errors sent to another process keep type, arguments and attributes, or else their type's name and text."""

from __future__ import annotations

import pickle
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stallfree as sf
from stallfree.errors import lock_held, text_of
from stallfree.ipc.remote import RemoteTraceback, pack_error, unpack_error


class Coded(ValueError):
    """Wants other arguments than it passes on."""

    def __init__(self, code: int, lock: object = None) -> None:
        super().__init__(f"code {code}")
        self.code, self.lock = code, lock


class Missing(OSError):
    """The same, with fields that Python sets."""

    def __init__(self, path: str) -> None:
        super().__init__(2, "not there", path)


def sent(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return unpack_error(memoryview(pack_error(raised)))


@settings(max_examples=30)
@given(message=st.text(), where=st.text(), id=st.integers(-(2**63), 2**63 - 1))
def test_errors_of_samples(message: str, where: str, id: int) -> None:
    got = sent(sf.SampleError(message, id=id, where=where))
    assert isinstance(got, sf.SampleError)
    assert (text_of(got), got.id, got.where, got.page) == (message, id, where, "sample-failed")


@pytest.mark.parametrize(
    "error",
    [
        KeyError("k"),
        ValueError("no", 3),
        FileNotFoundError(2, "not there", "x"),
        UnicodeDecodeError("ascii", b"\xff", 0, 1, "no"),
        KeyboardInterrupt(),
        lock_held("busy"),
        Coded(3),
        Missing("x"),
    ],
)
def test_an_error_is_raised_as_it_is(error: BaseException) -> None:
    got = sent(error)
    assert (type(got), got.args) == (type(error), error.args)
    for name in ("errno", "filename", "page", "code"):
        assert getattr(got, name, None) == getattr(error, name, None)
    assert isinstance(got.__cause__, RemoteTraceback)
    assert type(error).__name__ in str(got.__cause__)
    assert "test_remote.py" in str(got.__cause__)


def test_what_has_no_pickle_is_left_out() -> None:
    got = sent(Coded(3, threading.Lock()))
    assert (type(got), str(got)) == (Coded, "code 3")
    got = sent(ValueError("no", threading.Lock()))
    assert isinstance(got, sf.StallfreeError)
    assert text_of(got).startswith("another process raised ValueError: ('no', <unlocked _thread.lock")


def test_a_type_that_another_process_does_not_find() -> None:
    class Local(ValueError):
        pass

    got = sent(Local("no"))
    assert (type(got), text_of(got)) == (sf.StallfreeError, "another process raised Local: no")
    assert "Local: no" in str(got.__cause__)


def test_the_traceback_of_a_stallfree_error_is_that_of_its_cause() -> None:
    try:
        raise sf.SampleError("sample 3") from KeyError("k")
    except sf.SampleError as error:
        trace = str(unpack_error(pack_error(error)).__cause__)
    assert "KeyError: 'k'" in trace
    assert "sample 3" not in trace


def test_an_error_whose_text_fails() -> None:
    class Bad(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert text_of(sent(Bad())) == "another process raised Bad: (its text cannot be made: RuntimeError)"
    assert pickle.loads(pack_error(Bad()))
