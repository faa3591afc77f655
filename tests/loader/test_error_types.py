"""An error of a data set, transform, `collate_fn`, `worker_init_fn` or sampler is raised as it is, with a note."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import stallfree as sf
from loader_data import Made

BAD = 5


class Missing(FileNotFoundError):
    """Takes other arguments than an exception does, and holds more."""

    def __init__(self, folder: str, name: str, *, tries: int) -> None:
        super().__init__(2, "no such volume", f"{folder}/{name}")
        self.tries = tries


class Holding(RuntimeError):
    """Holds an object that has no pickle."""

    def __init__(self) -> None:
        super().__init__("holds")
        self.call, self.number = lambda: 0, 7


def local() -> Exception:
    class Hidden(LookupError):
        pass

    return Hidden("seen")


def chained() -> Exception:
    error = ValueError("no volume", 3)
    error.__cause__ = OSError(5, "no answer")
    return error


TABLE: list[tuple[Callable[[], Exception], dict[str, Any]]] = [
    (lambda: Missing("/data", "a", tries=3), {"errno": 2, "filename": "/data/a", "tries": 3}),
    (lambda: KeyError("left label"), {}),
    (lambda: IndexError(7), {}),
    (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), {"start": 0}),
    (chained, {}),
    (lambda: ExceptionGroup("several", [ValueError(1), KeyError("k")]), {}),
    (Holding, {"number": 7}),
    (lambda: sf.StorageError("full"), {"page": "folder-unusable"}),
    (lambda: StopIteration("end"), {}),
]
LOCAL, FIRST = len(TABLE), 2


class Failing:
    """Sample 2 + n raises error n of the table, and the sample after these one of a class that has no pickle."""

    def __init__(self, last: int = LOCAL) -> None:
        self.last = last

    def __len__(self) -> int:
        return FIRST + LOCAL + 3

    def __getitem__(self, id: int) -> torch.Tensor:
        if FIRST <= id <= FIRST + self.last:
            raise TABLE[id - FIRST][0]() if id - FIRST < LOCAL else local()
        return torch.tensor(id)


def outcomes(loader: Any) -> list[Any]:
    """The batches of a loader, and its errors in their place."""
    found: list[Any] = []
    iterator = iter(loader)
    for _ in range(len(Failing())):
        try:
            found.append(next(iterator))
        except Exception as error:
            found.append(error)
    with pytest.raises(StopIteration):
        next(iterator)
    return found


def is_as_raised(error: Any, expected: Exception) -> bool:
    """Whether type, arguments and cause are equal; a `StopIteration` would end the loop."""
    if isinstance(expected, StopIteration):
        return type(error) is sf.BatchError and repr(error.__cause__) == repr(expected)
    return (type(error), repr(error.args), repr(error.__cause__)) == (
        *(type(expected), repr(expected.args), repr(expected.__cause__)),
    )


def plain(workers: int, method: str) -> Iterator[Any]:
    with sf.DataLoader(Failing(), num_workers=workers, multiprocessing_context=method if workers else None) as loader:
        yield loader


def cached(workers: int, method: str) -> Iterator[Any]:
    with (
        sf.CachedDataset(Failing(), capacity="1MiB") as data,
        sf.DataLoader(data, num_workers=workers, multiprocessing_context=method if workers else None) as loader,
    ):
        yield loader


def under_torch(workers: int, method: str) -> Iterator[Any]:
    """Its own workers raise other errors; see below."""
    with sf.CachedDataset(Failing(), capacity="1MiB") as data:
        yield torch.utils.data.DataLoader(data)  # type: ignore[arg-type]


def shared(workers: int, method: str) -> Iterator[Any]:
    with sf.SharedLoader(Failing(), group="errors", num_workers=workers, multiprocessing_context=method) as loader:
        yield loader


@pytest.mark.parametrize(
    ("make", "workers", "method"),
    [
        *((make, workers, "fork") for make in (plain, cached) for workers in (0, 2)),
        (under_torch, 0, ""),
        (shared, 2, "fork"),
        *(pytest.param(make, 2, "spawn", marks=pytest.mark.slow) for make in (plain, cached, shared)),
    ],
)
def test_errors_are_raised_as_they_are(make: Callable[[int, str], Iterator[Any]], workers: int, method: str) -> None:
    for loader in make(workers, method):
        found = outcomes(loader)
        for id, (raised, fields) in enumerate(TABLE, FIRST):
            error = found[id]
            assert is_as_raised(error, raised()), repr(error)
            assert {name: getattr(error, name) for name in fields} == fields
            note = error.__notes__[0]
            assert re.fullmatch(
                rf"stallfree: fetching sample {id}" + (r", in worker \d \(process \d+\)" if workers else ""), note
            )
        hidden = found[FIRST + LOCAL]
        assert type(hidden).__name__ == ("BatchError" if workers else "Hidden")
        assert str(hidden).startswith("Hidden: seen (" if workers else "seen")
        assert [int(found[id]) for id in (0, 1, -2, -1)] == [0, 1, len(found) - 2, len(found) - 1]
        del loader, error, hidden, found


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_to_end_the_program(workers: int, kind: type[BaseException]) -> None:
    """In a worker it ends that process, as with torch's loader; its batch is repeated, and then an error."""

    def fail(id: int) -> torch.Tensor:
        if id == BAD:
            raise kind
        return torch.tensor(id)

    expected = RuntimeError if workers else kind
    with pytest.raises(expected) as caught, sf.DataLoader(Made(8, fail), num_workers=workers) as loader:
        list(loader)
    assert type(caught.value) is (sf.WorkerError if workers else kind)


# -- other functions of the user --------------------------------------------------------------------------------------


def fails(_: Any) -> Any:
    raise Missing("/data", "a", tries=3)


def stops(_: Any) -> Any:
    raise StopIteration


class Sampler(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0
        fails(None)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ({"dataset": [1, 2, 3], "collate_fn": fails}, r"collating the samples \[0\]"),
        ({"dataset": sf.FileDataset([__file__], transform=fails)}, rf"preparing sample 0 \({__file__}\)"),
        ({"dataset": [1, 2, 3], "sampler": Sampler()}, None),
        ({"dataset": [1, 2, 3], "worker_init_fn": fails}, "calling worker_init_fn"),
    ],
    ids=["collate_fn", "transform", "sampler", "worker_init_fn"],
)
def test_errors_of_other_functions(arguments: dict[str, Any], note: str | None, workers: int) -> None:
    if "worker_init_fn" in arguments and not workers:
        return
    with pytest.raises(Missing) as caught, sf.DataLoader(**arguments, num_workers=workers) as loader:
        list(loader)
    assert (caught.value.args, caught.value.errno, caught.value.tries) == ((2, "no such volume"), 2, 3)
    if note is not None:
        assert re.match(f"stallfree: {note}{', in worker 0' if workers else ''}", caught.value.__notes__[0])
        assert workers == 0 or "in fails" in caught.value.__notes__[1]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("arguments", [{"collate_fn": stops}, {"worker_init_fn": stops}])
def test_stop_iteration_of_other_functions(arguments: dict[str, Any], workers: int) -> None:
    if "worker_init_fn" in arguments and not workers:
        return
    with sf.DataLoader([1, 2, 3], num_workers=workers, **arguments) as loader:
        with pytest.raises(sf.BatchError, match="raised StopIteration") as caught:
            list(loader)
        assert type(caught.value.__cause__) is StopIteration


def kept(data: Any) -> sf.CachedDataset:
    return sf.CachedDataset(data, capacity="1MiB")


def windowed(data: Any) -> sf.SmartCacheDataset:
    return sf.SmartCacheDataset(data, cache_num=8, replace_rate=0)


def rows(loader: Any) -> Iterator[int]:
    for batch in loader:
        yield int(batch)


class Ending:
    """One sample raises what ends a loop over a list, or over an iterator."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def __call__(self, id: int) -> torch.Tensor:
        if id == BAD:
            raise self.kind
        return torch.tensor(id)


@pytest.mark.parametrize(("kind", "expected"), [(IndexError, IndexError), (StopIteration, sf.BatchError)])
@pytest.mark.parametrize("form", [kept, windowed, sf.DataLoader])
def test_no_loop_ends_in_silence(form: Any, kind: type[Exception], expected: type[Exception]) -> None:
    """In this process: of our loader, of torch's, over the data set itself, and of a generator around it."""
    with form(Made(8, Ending(kind))) as made:
        loops = [made] if form is sf.DataLoader else [sf.DataLoader(made), torch.utils.data.DataLoader(made), made]
        for loop in loops:
            with pytest.raises(expected, match="fetching sample 5"):
                list(rows(loop))


def test_a_skipped_error_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail(id: int) -> torch.Tensor:
        if id == BAD:
            raise OSError("bad\nsector")
        return torch.tensor(id)

    for workers in (0, 1):
        with sf.DataLoader(Made(8, fail), on_error="skip", num_workers=workers) as loader:
            assert len(list(loader)) == 7
            assert loader.stats().skips == 1
    ours, theirs = (record.message for record in caplog.records)
    assert ours == "left out a sample: fetching sample 5 failed: OSError: bad sector"
    assert re.match(r"left out a sample: fetching sample 5, in worker 0 \(process \d+\) failed: OSError: bad", theirs)
