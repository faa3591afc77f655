"""Whatever goes wrong is heard of, with the sample, or left out and counted where that was asked for."""

from __future__ import annotations

import logging
import multiprocessing
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import stallfree as sf
from loader_data import Gate, Made, as_list, zero_dim
from stallfree.loader.pool import WorkerPool

WORKERS = pytest.mark.parametrize("workers", [0, 2])
BAD = (3, 4, 5, 9)


def broken(id: int) -> Any:
    if id in BAD:
        raise KeyError(f"no sample {id} here")
    return torch.tensor(id)


def told(error: BaseException) -> str:
    """The notes of an error."""
    return "\n".join(error.__notes__)


@WORKERS
def test_an_error_in_a_sample(workers: int) -> None:
    loader = sf.DataLoader(Made(12, broken), batch_size=2, num_workers=workers)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(KeyError, match=r"^'no sample 3 here'\nstallfree: fetching sample 3") as caught:
        next(iterator)
    assert caught.value.args == ("no sample 3 here",)
    if workers:
        assert re.search(
            r"sample 3, in worker 1 \(process \d+\)\nTraceback .*\n(.*\n)* .*in broken", told(caught.value)
        )
    # A loop that goes on gets the batches that follow.
    with pytest.raises(KeyError, match="sample 4"):
        next(iterator)
    assert next(iterator).tolist() == [6, 7]
    with pytest.raises(KeyError, match="sample 9"):
        next(iterator)
    assert next(iterator).tolist() == [10, 11]
    assert next(iterator, None) is None


def test_where_a_file_lies(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"no picture")
    source = sf.FileDataset(
        [str(tmp_path / "a"), str(tmp_path / "b")], [0, 1], transform=sf.OnItem(0, sf.DecodeImage())
    )
    with pytest.raises(sf.InputError, match=rf"preparing sample 0 \({tmp_path / 'a'}\)"):
        list(sf.DataLoader(source))
    (tmp_path / "a").unlink()
    with pytest.raises(FileNotFoundError, match=rf"fetching sample 0 \({tmp_path / 'a'}\), in worker 0"):
        list(sf.DataLoader(source, num_workers=1))


@pytest.mark.parametrize(("workers", "cached"), [(0, False), (2, True)])
def test_skip(workers: int, cached: bool, caplog: pytest.LogCaptureFixture) -> None:
    base = Made(12, broken)
    dataset: Any = sf.CachedDataset(base, capacity="32MiB") if cached else base
    loader = sf.DataLoader(
        dataset, batch_size=2, num_workers=workers, on_error="skip", with_ids=True, persistent_workers=workers > 0
    )
    with caplog.at_level(logging.WARNING, "stallfree"):
        batches = list(loader)
    expected = [[0, 1], [2], [6, 7], [8], [10, 11]]  # 4 and 5 were a whole batch
    assert [batch.ids.tolist() for batch in batches] == expected
    assert [batch.data.tolist() for batch in batches] == expected
    assert [f"sample {id} " in record.message for id, record in zip(BAD, caplog.records, strict=True)] == [True] * 4
    list(loader)
    stats = loader.stats()
    assert stats.skips == 8
    assert stats.samples == 16
    assert stats.batches == 10
    assert stats.hits + stats.misses == stats.samples + stats.skips
    assert len(caplog.records) == 5  # only the first ones are reported
    loader.close()
    if cached:
        dataset.close()


def test_batches_that_cannot_be_brought_over() -> None:
    with pytest.raises(sf.CodecError, match="pickled"):
        list(sf.DataLoader(Made(4, lambda id: lambda: id), collate_fn=as_list, num_workers=1))


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (lambda: {"dataset": sf.FileDataset(["x"], [0], transform=lambda item: item)}, "the transform .*lambda"),
        (lambda: {"dataset": Made(4, zero_dim), "collate_fn": lambda samples: samples}, "collate_fn"),
        (lambda: {"dataset": Made(4, zero_dim), "worker_init_fn": lambda worker: None}, "worker_init_fn"),
        (lambda: {"dataset": Made(4, lambda id: id)}, "the data set"),
    ],
    ids=["transform", "collate_fn", "worker_init_fn", "dataset"],
)
def test_what_cannot_be_sent_to_a_worker(make: Any, culprit: str) -> None:
    method = "forkserver"
    loader = sf.DataLoader(**make(), num_workers=2, multiprocessing_context=method)
    for _ in range(2):
        with pytest.raises(sf.InputError, match=f"{culprit}.* cannot be sent to a process .*'{method}'"):
            list(loader)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


def test_a_wait_has_a_limit_and_says_for_what(gate: Gate) -> None:
    with sf.DataLoader(
        Made(8, gate), batch_size=2, num_workers=1, timeout=0.3, multiprocessing_context="fork"
    ) as loader:
        iterator = iter(loader)
        got = [batch.tolist() for batch in islice(patient(iterator), 2)]
        with pytest.raises(
            sf.WaitError, match=r"batch 2 of epoch 0 .* 0\.3 s.*samples are \[4, 5\].*timeout"
        ) as caught:
            next(iterator)
        assert isinstance(caught.value, TimeoutError)
        (worker,) = multiprocessing.active_children()
        assert f"worker process {worker.pid}, alive" in str(caught.value)
        gate.open()  # the wait may be taken up again
        got += [batch.tolist() for batch in patient(iterator)]
    assert got == [[0, 1], [2, 3], [4, 5], [6, 7]]


def patient(iterator: Any) -> Any:
    """Goes on after a wait that was too long."""
    while True:
        try:
            yield next(iterator)
        except sf.WaitError:
            continue
        except StopIteration:
            return


@pytest.mark.parametrize("persistent", [False, True])
def test_keyboard_interrupt_while_waiting(persistent: bool, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        gate.open()
        raise KeyboardInterrupt

    with sf.DataLoader(
        Made(8, gate), 2, num_workers=1, persistent_workers=persistent, multiprocessing_context="fork"
    ) as loader:
        iterator = iter(loader)
        assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1], [2, 3]]
        with monkeypatch.context() as patched:
            patched.setattr(WorkerPool, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
        with pytest.raises(sf.StallfreeError, match="this iteration is over"):
            next(iterator)
        assert len(list(loader)) == 4
