"""An error arrives from another process as it was raised, whatever its constructor wants."""

import os
import pickle
import urllib.error
from typing import Any

import pytest

import stallfree as sf
from stallfree.errors import lock_held
from stallfree.ipc.channel import pack_error, unpack_error

WHY = "(an error of a class that cannot be sent from one process to another)"


class Missing(FileNotFoundError):
    """Takes other arguments than an exception does, and holds more."""

    def __init__(self, folder: str, name: str, *, tries: int) -> None:
        super().__init__(2, "no such volume", f"{folder}/{name}")
        self.tries = tries


class Slotted(ValueError):
    __slots__ = ("line",)

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line}")
        self.line = line


class Wants(RuntimeError):
    """Cannot be made without an argument."""

    def __new__(cls, needed: int) -> "Wants":
        return super().__new__(cls, needed)


class Holding(RuntimeError):
    """Holds an object that has no pickle, and one that cannot be unpickled."""

    def __init__(self) -> None:
        super().__init__("holds")
        self.call, self.part, self.number = lambda: 0, Part(), 7


class Part:
    def __reduce__(self) -> Any:
        return dict.fromkeys, (3,)  # which raises


class Reduced(Exception):
    """Its own way to be pickled loses what it was given."""

    def __reduce__(self) -> Any:
        return Reduced, ()


def local() -> Exception:
    class Hidden(LookupError):
        pass

    return Hidden("seen")


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def sent(error: BaseException) -> Any:
    return unpack_error(memoryview(pack_error(error)))


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (Missing("/data", "a", tries=3), {"errno": 2, "filename": "/data/a", "tries": 3}),
        (Slotted(4), {"line": 4}),
        (Wants(3), {}),
        (Holding(), {"number": 7}),
        (Reduced("kept"), {}),
        (KeyError("left label"), {}),
        (StopIteration(5), {"value": 5}),
        (SystemExit(3), {"code": 3}),
        (KeyboardInterrupt(), {}),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start"), {"start": 0, "reason": "invalid start"}),
        (ImportError("none", name="module"), {"name": "module"}),
        (urllib.error.URLError("refused"), {"reason": "refused"}),
        (sf.WorkerError("killed", ids=[3, 4]), {"ids": [3, 4], "page": "worker-died"}),
        (lock_held("busy"), {"page": "lock-held"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_class_arguments_and_attributes(error: BaseException, fields: dict[str, Any]) -> None:
    back = sent(raised(error))
    assert (type(back), back.args, str(back)) == (type(error), error.args, str(error))
    assert {name: getattr(back, name) for name in fields} == fields


def test_cause_context_notes_and_traceback() -> None:
    error = raised(KeyError("label"), raised(Missing("/data", "a", tries=1)))
    error.add_note("of the user")
    back = sent(error)
    assert back.__notes__[0] == "of the user"
    assert back.__notes__[1].startswith(f"Traceback in process {os.getpid()} (most recent call last):\n")
    assert "in raised" in back.__notes__[1]
    assert (type(back.__cause__), back.__cause__.tries, back.__suppress_context__) == (Missing, 1, True)
    assert "in raised" in back.__cause__.__notes__[0]
    again = sent(back)  # as from a worker through the coordinator of a group to its members
    assert (type(again), again.args, again.__notes__) == (KeyError, ("label",), back.__notes__)
    assert pickle.loads(pickle.dumps(back)).args == ("label",)
    try:
        try:
            raise ValueError("first")
        except ValueError:
            {}["second"]
    except KeyError as other:
        back = sent(other)
    assert (repr(back.__context__), back.__cause__, back.__suppress_context__) == ("ValueError('first')", None, False)


def test_what_no_other_process_finds_becomes_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class, an argument, one of a group; a class that is missing here alone; an error that has no text."""
    back = sent(raised(local(), ValueError("cause")))
    assert (type(back), back.args) == (sf.BatchError, (f"Hidden: seen {WHY}",))
    assert isinstance(back, RuntimeError)
    assert "in raised" in back.__notes__[0]
    assert repr(back.__cause__) == "ValueError('cause')"

    back = sent(KeyError(local, lambda: 0))
    assert (type(back), back.args[0]) == (KeyError, local)
    assert back.args[1].startswith("<function")

    back = sent(raised(ExceptionGroup("several", [Missing("/data", "a", tries=2), local()])))
    assert type(back) is ExceptionGroup
    first, second = back.exceptions
    assert (type(first), first.tries) == (Missing, 2)
    assert (type(second), second.args) == (sf.BatchError, (f"Hidden: seen {WHY}",))

    packed = pack_error(raised(Wants(3)))
    monkeypatch.delitem(globals(), "Wants")
    back = unpack_error(packed)
    assert (type(back), back.args) == (sf.BatchError, (f"Wants: 3 {WHY}",))

    class Silent(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert "Silent: (its text cannot be made: ValueError)" in str(sent(Silent()))
