"""What a data set raises is caught by its own type and as a `SampleError`, whichever way the sample came."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._utils import ExceptionWrapper

import stallfree as sf
from loader_data import Made
from stallfree.error_types import also_of_type
from stallfree.pipeline.protocol import sample_error

BAD = 5


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

    def __new__(cls, needed: int) -> Wants:
        return super().__new__(cls, needed)


class Meta(type):
    pass


class OfMeta(LookupError, metaclass=Meta):
    """No class can be derived from this one and one of another metaclass."""


class ReadOnly(ArithmeticError):
    @property
    def id(self) -> str:
        return "mine"


def no_file(id: int) -> None:
    Path("/no/such/file").read_bytes()


def no_key(id: int) -> None:
    {}["left label"]


def no_text(id: int) -> None:
    b"\xff".decode()


def no_item(id: int) -> None:
    [][id]


def no_volume(id: int) -> None:
    raise Missing("/data", "a", tries=3)


def local(id: int) -> None:
    class Hidden(LookupError):
        pass

    raise Hidden("seen")


def raising(kind: type[BaseException], *arguments: Any) -> Callable[[int], None]:
    def fail(id: int) -> None:
        raise kind(*arguments)

    return fail


class Failing:
    """Sample 5 fails."""

    def __init__(self, fail: Callable[[int], Any]) -> None:
        self.fail = fail

    def __call__(self, id: int) -> torch.Tensor:
        if id == BAD:
            self.fail(id)
        return torch.tensor(id)


def made_of(fail: Callable[[int], Any]) -> sf.SampleError:
    try:
        fail(BAD)
    except Exception as error:
        return sample_error(error, None, BAD, "fetching")
    raise AssertionError


def carried(error: Any) -> Any:
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("way", [lambda error: error, carried], ids=["here", "pickled"])
@pytest.mark.parametrize(
    ("fail", "kind", "text", "fields"),
    [
        (no_file, FileNotFoundError, "No such file", {"errno": 2, "filename": "/no/such/file"}),
        (no_key, KeyError, "KeyError: 'left label'", {}),
        (no_text, UnicodeDecodeError, "can't decode", {"start": 0, "reason": "invalid start byte"}),
        (no_item, IndexError, "out of range", {}),
        (no_volume, Missing, "no such volume", {"errno": 2, "filename": "/data/a", "tries": 3}),
        (raising(Slotted, 4), Slotted, "line 4", {"line": 4}),
        (raising(sf.StorageError, "full"), sf.StorageError, "full", {}),
        (raising(sf.InputError, "bad"), sf.InputError, "bad", {}),
        (raising(Wants, 3), RuntimeError, "Wants: 3", {}),
        (raising(OfMeta, "x"), LookupError, "OfMeta: x", {}),
        (raising(ReadOnly, "x"), ArithmeticError, "ReadOnly: x", {}),
        (raising(StopIteration, "end"), sf.SampleError, "end", {}),
        (raising(StopAsyncIteration), sf.SampleError, "StopAsyncIteration", {}),
        (raising(Exception, "plain"), sf.SampleError, "plain", {}),
    ],
)  # fmt: skip
def test_both_types(way: Any, fail: Any, kind: type, text: str, fields: dict[str, Any]) -> None:
    error = way(made_of(fail))
    assert isinstance(error, sf.SampleError)
    assert isinstance(error, kind)
    assert not isinstance(error, (StopIteration, StopAsyncIteration))  # which would end a loop as if all were well
    assert str(error).startswith("fetching sample 5 failed: ")
    assert text in str(error)
    assert (error.id, error.where) == (BAD, "")
    assert {name: getattr(error, name) for name in fields} == fields
    assert type(error).__name__ == "SampleError"


def test_a_type_that_no_other_process_finds() -> None:
    assert type(made_of(local)).__mro__[3].__name__ == "Hidden"
    error = carried(made_of(local))
    assert isinstance(error, LookupError)
    assert "Hidden: seen" in str(error)


def test_one_class_for_each_type() -> None:
    assert type(made_of(no_file)) is type(made_of(no_file)) is carried(type(made_of(no_file)))


def test_an_object_in_an_error_is_not_sent() -> None:
    """What lacked an attribute may be the whole data set."""
    error = made_of(lambda id: test_both_types.missing)  # type: ignore[attr-defined]
    assert error.obj is test_both_types  # type: ignore[attr-defined]
    assert carried(error).name == "missing"
    assert carried(error).obj is None


def test_an_attribute_that_cannot_be_sent_is_left_out() -> None:
    problem = ValueError("x")
    problem.lock, problem.line = open(os.devnull), 3  # type: ignore[attr-defined]  # noqa: SIM115
    error = carried(also_of_type(sf.SampleError("x", id=1), problem))
    assert (error.line, hasattr(error, "lock")) == (3, False)
    problem.lock.close()  # type: ignore[attr-defined]


def cached(data: Any) -> sf.CachedDataset:
    return sf.CachedDataset(data, capacity="1MiB")


def windowed(data: Any) -> sf.SmartCacheDataset:
    return sf.SmartCacheDataset(data, cache_num=8, replace_rate=0)


@pytest.mark.parametrize("fail", [no_item, raising(StopIteration)])
@pytest.mark.parametrize("form", [None, cached, windowed], ids=["plain", "cached", "windowed"])
def test_loops(form: Any, fail: Any) -> None:
    """In this process: of our loader, of torch's, and over the data set itself."""
    kind = IndexError if fail is no_item else sf.SampleError
    data: Any = Made(8, Failing(fail))
    with form(data) if form else sf.DataLoader(data) as made:
        loops = [sf.DataLoader(made), torch.utils.data.DataLoader(made), made] if form else [made]
        for loop in loops:
            with pytest.raises(kind, match="fetching sample 5") as caught:
                list(loop)
            assert isinstance(caught.value, sf.SampleError)
            assert caught.value.id == BAD
            assert type(caught.value.__cause__) is (kind if kind is not sf.SampleError else StopIteration)


def test_a_worker() -> None:
    with pytest.raises(Missing, match="fetching sample 5") as caught:
        list(sf.DataLoader(Made(8, Failing(no_volume)), num_workers=1))
    assert isinstance(caught.value, sf.SampleError)
    assert caught.value.errno == 2


@pytest.mark.parametrize("fail", [no_file, no_volume, no_key, no_item, local])
def test_a_worker_of_torch(fail: Any) -> None:
    """It sends the type and a text, of which the loader there makes the error."""
    error = made_of(fail)
    sent = ForkingPickler.dumps(ExceptionWrapper((type(error), error, None), "in a worker"))
    kind = LookupError if fail is local else type(error).__mro__[3]
    with pytest.raises(kind, match="fetching sample 5") as caught:
        pickle.loads(sent).reraise()
    assert isinstance(caught.value, sf.SampleError)
    assert caught.value.id == -1


class Keyed(ValueError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Two(OSError):
    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}:{line}")
        self.file, self.line = file, line


class Holding(RuntimeError):
    def __init__(self) -> None:
        super().__init__("holds")
        self.call, self.number = lambda: 0, 7


class Plain(KeyError):
    pass


def hidden(*arguments: Any) -> Exception:
    class Hidden(LookupError):
        pass

    return Hidden(*arguments)


RAISED: dict[str, tuple[Callable[[], Exception], type, str, dict[str, Any]]] = {
    "keywords": (lambda: Keyed(code=3), Keyed, "code 3", {"code": 3, "args": ("code 3",)}),
    "two arguments": (lambda: Two("a", 2), Two, "a:2", {"file": "a", "line": 2}),
    "three": (lambda: Missing("/data", "a", tries=3), Missing, "no such volume", {"tries": 3, "errno": 2}),
    "slots": (lambda: Slotted(4), Slotted, "line 4", {}),
    "no pickle of an attribute": (Holding, Holding, "holds", {}),
    "no pickle of an argument": (lambda: Plain(lambda: 0, "left"), sf.StallfreeError, "Plain: .*left", {}),
    "its own __new__": (lambda: Wants(3), Wants, "3", {"args": (3,)}),
    "of a function": (lambda: hidden("seen"), sf.StallfreeError, "Hidden: seen", {}),
}


@pytest.mark.parametrize("name", RAISED)
@pytest.mark.parametrize("place", ["collate_fn", "worker_init_fn", "stream"])
def test_other_errors_of_a_worker(place: str, name: str) -> None:
    """They are those that were raised, whatever their constructors want."""
    make, kind, text, fields = RAISED[name]
    if place == "stream":  # its samples fail, so that it is a `SampleError` with a text of its own
        fields = {name: value for name, value in fields.items() if name != "args"}

    def fail(_: Any) -> Any:
        raise make()

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from map(fail, range(3))

    data: Any = Stream() if place == "stream" else [1, 2]
    options: dict[str, Any] = {} if place == "stream" else {place: fail}
    with pytest.raises(kind, match=text) as caught, sf.DataLoader(data, num_workers=1, **options) as loader:
        list(loader)
    assert {name: getattr(caught.value, name) for name in fields} == fields
    assert isinstance(caught.value, sf.SampleError) if place == "stream" else type(caught.value) is kind
    assert "in fail" in str(caught.value.__cause__)


def test_a_group() -> None:
    with sf.SharedLoader(Made(8, Failing(no_volume)), group="types") as loader:
        with pytest.raises(Missing, match="fetching sample 5") as caught:
            list(loader)
        assert isinstance(caught.value, sf.SampleError)
        assert (caught.value.id, caught.value.errno, caught.value.tries) == (BAD, 2, 3)


@pytest.mark.parametrize(
    ("kind", "form"), [(KeyboardInterrupt, None), (SystemExit, cached), (KeyboardInterrupt, windowed)]
)
def test_what_is_to_end_the_program_does(form: Any, kind: type[BaseException]) -> None:
    data: Any = Made(8, Failing(raising(kind)))
    with pytest.raises(kind) as caught, form(data) if form else sf.DataLoader(data) as made:
        list(sf.DataLoader(made) if form else made)
    assert type(caught.value) is kind


def rows(loader: Any) -> Iterator[int]:
    for batch in loader:
        yield from batch.tolist()


def test_a_generator_around_the_loop_does_not_end_in_silence() -> None:
    with pytest.raises(sf.SampleError):
        list(rows(sf.DataLoader(Made(8, Failing(raising(StopIteration))))))
