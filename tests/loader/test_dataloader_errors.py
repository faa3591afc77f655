"""An error of the user's code is raised as it is, with a note that names the sample; or it is left out and counted."""

import multiprocessing
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch

import stallfree as sf
from loader_data import Failing, Gate, Made, Missing, as_list, loading, local, zero_dim
from stallfree.loader.pool import WorkerPool
from warm import Interpreter


def chained() -> Exception:
    error = ValueError("no volume", 3)
    error.__cause__ = OSError(5, "no answer")
    return error


TABLE: list[tuple[Callable[[], Exception], dict[str, Any]]] = [
    (lambda: Missing("/data", "a", tries=3), {"errno": 2, "filename": "/data/a", "tries": 3}),
    (lambda: KeyError("left label"), {}), (chained, {}), (lambda: StopIteration("end"), {}),
]  # fmt: skip
LOCAL, FIRST = len(TABLE), 2


def failing(id: int) -> torch.Tensor:
    """Sample 2 + n raises error n of the table, and the sample after these one of a class that has no pickle."""
    errors = [*(raised for raised, _ in TABLE), local]
    if FIRST <= id <= FIRST + LOCAL:
        raise errors[id - FIRST]()
    return torch.tensor(id)


FAILING = Made(FIRST + LOCAL + 3, failing)


def outcomes(iterator: Any) -> Iterator[Any]:
    """The batches of an iterator, and its errors in their place."""
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except Exception as error:
            yield error


def patient(iterator: Any) -> Iterator[Any]:
    """Goes on after a wait that was too long."""
    return (found for found in outcomes(iterator) if not isinstance(found, sf.WaitError))


def is_as_raised(error: Any, expected: Exception) -> bool:
    """Whether type, arguments and cause are equal; a `StopIteration` would end the loop."""
    if isinstance(expected, StopIteration):
        return type(error) is sf.BatchError and repr(error.__cause__) == repr(expected)
    seen, raised = ((type(each), repr(each.args), repr(each.__cause__)) for each in (error, expected))
    return seen == raised


def shared(data: Any, **options: Any) -> sf.SharedLoader:
    return sf.SharedLoader(data, group="errors", **options)


@pytest.mark.parametrize(("make", "workers", "method"), [
    *((make, workers, "fork") for make in (loading, partial(loading, cached=True)) for workers in (0, 2)),
    (shared, 2, "fork"), *(pytest.param(make, 2, "spawn", marks=pytest.mark.slow) for make in (loading, shared)),
])  # fmt: skip
def test_errors_are_raised_as_they_are(make: Callable[..., Any], workers: int, method: str) -> None:
    """The loop goes on with the batches that follow."""
    with make(FAILING, num_workers=workers, **({"multiprocessing_context": method} if workers else {})) as loader:
        found = [*islice(outcomes(iter(loader)), len(FAILING) + 1)]
        assert len(found) == len(FAILING)
        for id, (raised, fields) in enumerate(TABLE, FIRST):
            error = found[id]
            assert is_as_raised(error, raised()), repr(error)
            assert {name: getattr(error, name) for name in fields} == fields
            place = r", in worker \d \(process \d+\)" if workers else ""
            assert re.fullmatch(rf"stallfree: fetching sample {id}{place}", error.__notes__[0])
        hidden = found[FIRST + LOCAL]
        assert type(hidden).__name__ == ("BatchError" if workers else "Hidden")
        assert str(hidden).startswith("Hidden: seen (" if workers else "seen")
        assert [int(found[id]) for id in (0, 1, -2, -1)] == [0, 1, len(found) - 2, len(found) - 1]
        del error, hidden, found


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_to_end_the_program(workers: int, kind: type[BaseException]) -> None:
    """In a worker it ends that process, as with torch's loader; its batch is repeated, and then an error."""
    loader = sf.DataLoader(Made(8, Failing(lambda id: kind())), num_workers=workers)
    with pytest.raises((RuntimeError, kind)) as caught, loader:
        list(loader)
    assert type(caught.value) is (sf.WorkerError if workers else kind)


def fails(_: Any) -> Any:
    raise Missing("/data", "a", tries=3)


def stops(_: Any) -> Any:
    raise StopIteration


class Sampler(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0
        fails(None)


OTHERS: dict[str, tuple[dict[str, Any], str | None]] = {
    "collate_fn": ({"collate_fn": fails}, r"collating the samples \[0\]"),
    "transform": ({"dataset": sf.FileDataset([__file__], transform=fails)}, rf"preparing sample 0 \({__file__}\)"),
    "file": ({"dataset": sf.FileDataset(["/nowhere"])}, r"fetching sample 0 \(/nowhere\)"),
    "sampler": ({"sampler": Sampler()}, None), "worker_init_fn": ({"worker_init_fn": fails}, "calling worker_init_fn"),
    "collate_fn that stops": ({"collate_fn": stops}, None),
    "worker_init_fn that stops": ({"worker_init_fn": stops}, None),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "workers"), [(case, n) for case in OTHERS for n in (0, 1) if n or "worker_init_fn" not in case]
)
def test_errors_of_other_functions(case: str, workers: int) -> None:
    arguments, note = OTHERS[case]
    stopped = "stops" in case
    loader = sf.DataLoader(**{"dataset": [1, 2, 3], "num_workers": workers, **arguments})
    with pytest.raises(sf.BatchError if stopped else FileNotFoundError) as caught, loader:
        list(loader)
    error = caught.value
    if stopped:
        assert "raised StopIteration" in str(error)
        assert type(error.__cause__) is StopIteration
    elif type(error) is Missing:
        assert (error.args, error.tries) == ((2, "no such volume"), 3)
    if note is not None:
        assert re.match(f"stallfree: {note}{', in worker 0' if workers else ''}", error.__notes__[0])
        assert workers == 0 or "Traceback" in error.__notes__[1]


FORMS: dict[str, Callable[[Any], Any]] = {
    "loader": sf.DataLoader, "cached": lambda data: sf.CachedDataset(data, capacity="1MiB"),
    "window": lambda data: sf.SmartCacheDataset(data, cache_num=8, replace_rate=0),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "expected"), [(IndexError, IndexError), (StopIteration, sf.BatchError)])
@pytest.mark.parametrize("form", FORMS)
def test_no_loop_ends_in_silence(form: str, kind: type[Exception], expected: type[Exception]) -> None:
    """In this process: of our loader, of torch's, over the data set itself, all of them in a generator."""
    with FORMS[form](Made(8, Failing(lambda id: kind()))) as made:
        loops = [made] if form == "loader" else [sf.DataLoader(made), torch.utils.data.DataLoader(made), made]
        for loop in loops:
            with pytest.raises(expected, match="fetching sample 5"):
                sum(int(batch) for batch in loop)


@pytest.mark.parametrize(("workers", "cached"), [(0, False), (2, True)])
def test_skip(workers: int, cached: bool, caplog: pytest.LogCaptureFixture) -> None:
    left_out = 3, 4, 5, 9
    expected = [[0, 1], [2], [6, 7], [8], [10, 11]]  # 4 and 5 were a whole batch
    place = r", in worker \d \(process \d+\)" if workers else ""
    options: dict[str, Any] = {"num_workers": workers, "on_error": "skip", "with_ids": True}
    data = Made(12, Failing(lambda id: OSError(f"bad\nsector {id}"), left_out))
    with loading(data, 2, cached=cached, **options) as loader:
        batches = list(loader)
        assert [batch.ids.tolist() for batch in batches] == [batch.data.tolist() for batch in batches] == expected
        for id, record in zip(left_out, caplog.records, strict=True):  # a line for each
            text = f"left out a sample: fetching sample {id}{place} failed: OSError: bad sector {id}"
            assert re.match(text, record.message)
        list(loader)
        stats = loader.stats()
        assert (stats.skips, stats.samples, stats.batches) == (8, 16, 10)
        assert stats.hits + stats.misses == stats.samples + stats.skips
        assert len(caplog.records) == 5  # only the first ones are reported


def test_batches_that_cannot_be_brought_over() -> None:
    with pytest.raises(sf.CodecError, match="pickled"):
        list(sf.DataLoader(Made(4, lambda id: lambda: id), collate_fn=as_list, num_workers=1))


UNSENDABLE: dict[str, dict[str, Any]] = {
    "the transform .*lambda": {"dataset": sf.FileDataset(["x"], [0], transform=lambda item: item)},
    "collate_fn": {"collate_fn": lambda samples: samples}, "worker_init_fn": {"worker_init_fn": lambda worker: None},
    "the data set": {"dataset": Made(4, lambda id: id)},
}  # fmt: skip


@pytest.mark.parametrize("culprit", UNSENDABLE)
def test_what_cannot_be_sent_to_a_worker(culprit: str) -> None:
    options = {"dataset": Made(4, zero_dim), "num_workers": 2, "multiprocessing_context": "forkserver"}
    loader = sf.DataLoader(**options | UNSENDABLE[culprit])
    for _ in range(2):
        with pytest.raises(sf.InputError, match=f"{culprit}.* cannot be sent to a process .*'forkserver'"):
            list(loader)


@pytest.mark.parametrize("evicted", [False, True])
def test_a_permanent_error_of_gathers_is_logged_once(
    evicted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And a sample that is evicted before it is gathered not at all."""
    samples, gather = [[float(id)] * 8 for id in range(40)], sf.cache.SampleCache.gather

    def fail(*arguments: Any) -> Any:
        return gather(*arguments) & [True, False, True, True] if evicted else 1 / 0

    with sf.CachedDataset(samples, capacity="1MiB") as data, sf.DataLoader(data, 4, num_workers=1) as loader:
        whole, before = repr(list(loader)), loader.stats().retries
        monkeypatch.setattr(sf.cache.SampleCache, "gather", fail)
        assert [repr(list(loader)) for _ in range(3)] == [whole] * 3
        assert loader.stats().retries - before == 30
    assert len(caplog.records) == (not evicted)
    for record in caplog.records:
        assert re.match("a batch could not be gathered .*(?s:.*)ZeroDivisionError: div", record.getMessage())


def test_a_wait_has_a_limit_and_says_for_what() -> None:
    with Gate() as gate, sf.DataLoader(Made(8, gate), batch_size=2, num_workers=1, timeout=0.3) as loader:
        iterator = iter(loader)
        got = [batch.tolist() for batch in islice(patient(iterator), 2)]
        expected = r"batch 2 of epoch 0 .* 0\.3 s.*samples are \[4, 5\].*timeout"
        with pytest.raises(sf.WaitError, match=expected) as caught:
            next(iterator)
        assert isinstance(caught.value, TimeoutError)
        (worker,) = multiprocessing.active_children()
        assert f"worker process {worker.pid}, alive" in str(caught.value)
        gate.open()  # the wait may be taken up again
        got += [batch.tolist() for batch in patient(iterator)]
    assert got == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("persistent", [False, True])
def test_keyboard_interrupt_while_waiting(persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        gate.open()
        raise KeyboardInterrupt

    with Gate() as gate, loading(Made(8, gate), 2, num_workers=1, persistent_workers=persistent) as loader:
        iterator = iter(loader)
        assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1], [2, 3]]
        with monkeypatch.context() as patched:
            patched.setattr(WorkerPool, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
        with pytest.raises(sf.StallfreeError, match="this iteration is over"):
            next(iterator)
        assert len(list(loader)) == 4


PROGRAM = """
import os, signal, stallfree as sf, torch
class Data:
    def __len__(self): return 8
    def __getitem__(self, id):
        if id == 5: {workers} or os.killpg(0, signal.SIGINT)
        return torch.tensor(id)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.setpgid(0, 0)
for sample in sf.DataLoader(Data(), num_workers={workers}):
    if {workers} and sample == 3: os.killpg(0, signal.SIGINT)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupt(workers: int, interpreter: Interpreter) -> None:
    """The signal goes to the whole group of processes, as from a terminal; without workers, while a sample is read."""
    done = interpreter.run(PROGRAM.format(workers=workers))
    assert done.err.strip().splitlines()[-1] == "KeyboardInterrupt"
    assert done.err.count("Traceback") == 1, done.err
