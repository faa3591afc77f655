"""`ProcessPrefetcher` yields the batches of its loader, with its errors in their places, and leaves nothing behind."""

import gc
import os
import pickle
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import stallfree as sf
from children import PATIENCE, Child, gone, until
from stallfree.device import process


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts processes like "spawn", with the imports already done."""
    monkeypatch.setattr(process, "_START_METHOD", "forkserver")


@dataclass
class Stamped:
    """A loader of batches that say their epoch and number."""

    batches: int = 5
    errors: tuple[int, ...] = ()  # numbers in whose place an error is, after which it continues
    ends: bool = False  # whether the first error ends the epoch
    gate: Path | None = None  # before batch 2 it waits until this file exists
    log: Path | None = None  # has a byte for each batch that was asked for
    epoch: int = -1

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        numbers = range(self.batches)
        return (self.batch(number) for number in numbers) if self.ends else map(self.batch, numbers)

    def batch(self, number: int) -> Any:
        if self.log is not None:
            with self.log.open("ab") as file:
                file.write(b"x")
        if number == 2 and self.gate is not None:
            until(self.gate.exists)
        if number in self.errors:
            raise FileNotFoundError(2, f"no picture for batch {number}")
        pixels = torch.full((4, 20_000), self.epoch * 1000 + number, dtype=torch.int32)
        return {"stamp": (self.epoch, number), "pixels": pixels}


def read_stamp(batch: Any) -> Any:
    """Return (epoch, number) of a batch, which must be complete."""
    epoch, number = batch["stamp"]
    assert batch["pixels"].shape == (4, 20_000)
    assert (batch["pixels"].numpy() == epoch * 1000 + number).all()  # a forked process has no threads of torch
    return epoch, number


def prefetch(make: Any, depth: int = 2) -> sf.ProcessPrefetcher[Any]:
    return sf.ProcessPrefetcher(make, "cpu", depth, timeout=PATIENCE)


def stamped(depth: int = 2, **script: Any) -> sf.ProcessPrefetcher[Any]:
    return prefetch(partial(Stamped, **script), depth)


def test_epochs_are_complete_until_it_is_closed_and_one_that_is_broken_off_leaves_nothing_behind() -> None:
    with stamped(batches=20) as batches:
        assert len(batches) == 20
        for epoch, take in enumerate((20, 3, 20, 1, 20)):
            iteration = iter(batches)
            assert [read_stamp(next(iteration)) for _ in range(take)] == [(epoch, number) for number in range(take)]
        assert list(iteration) == []
        for batch in batches:
            batch["pixels"].add_(1)
        kept = list(batches)  # which may be kept and changed
        assert [read_stamp(batch) for batch in kept] == [(6, number) for number in range(20)]
        assert all(batch["pixels"].is_shared() for batch in kept)
        memory = []
        for _ in range(20):  # batches that nobody takes are freed in the process that loads
            next(iter(batches))
            assert len(batches) == 20
            memory.append(psutil.Process(batches.pid).num_fds())
        assert max(memory[5:]) <= max(memory[:5]) + 8
        iteration = iter(batches)
        next(iteration)
    assert list(iteration) == []
    for late in (iter, len):
        with pytest.raises(sf.ProducerError, match="has ended, or was closed"):
            late(batches)  # type: ignore[operator]


def test_one_iteration_at_a_time_and_nothing_is_lost_silently() -> None:
    with stamped(batches=3) as batches:
        first = iter(batches)
        assert read_stamp(next(first)) == (0, 0)
        second = iter(batches)
        for _ in range(2):
            with pytest.raises(sf.StallfreeError, match="iterated again"):
                next(first)
        assert [read_stamp(batch) for batch in second] == [(1, 0), (1, 1), (1, 2)]
        assert len(list(batches)) == 3
        assert not list(second), "it had ended by itself"


def test_the_loader_is_no_further_ahead_than_it_may_be(tmp_path: Path) -> None:
    """`depth` batches are ready, one is in use, and the process has taken one more from the loader."""
    log = tmp_path / "log"
    with stamped(batches=30, log=log) as batches:
        for number, batch in enumerate(batches):
            assert read_stamp(batch)[1] == number
            if number % 10 == 0:
                until(lambda: log.stat().st_size == min(30, number + 4), "the loader is ahead")  # noqa: B023
    assert number == 29


@pytest.mark.parametrize("ends", [False, True])
def test_errors_of_the_loader_come_in_their_place(ends: bool) -> None:
    with stamped(batches=8, errors=(0, 3, 4), ends=ends) as batches:
        iteration = iter(batches)
        for number in [0] if ends else range(8):
            if number in (0, 3, 4):
                with pytest.raises(FileNotFoundError, match=f"no picture for batch {number}") as caught:
                    next(iteration)
                assert caught.value.errno == 2
                assert "in batch" in caught.value.__notes__[-1]
            else:
                assert read_stamp(next(iteration))[1] == number
        assert list(iteration) == []


def test_it_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    with stamped(batches=6, gate=tmp_path / "gate") as batches:
        iteration = iter(batches)
        assert [read_stamp(next(iteration))[1] for _ in range(2)] == [0, 1]
        batches.timeout = 0.05
        for _ in range(2):
            with pytest.raises(sf.WaitError, match=r"0.05 s for batch 2 of the epoch"):
                next(iteration)
        batches.timeout = PATIENCE
        (tmp_path / "gate").touch()
        assert [read_stamp(batch)[1] for batch in iteration] == [2, 3, 4, 5]


def test_a_forked_child_cannot_go_on_with_it() -> None:
    with stamped(batches=3) as batches:
        iteration = iter(batches)
        read_stamp(next(iteration))

        def use() -> None:
            for call in (partial(next, iteration), partial(iter, batches)):
                with pytest.raises(sf.InputError, match=r"belongs to process \d+, and this process is a child of it"):
                    call()
            batches.close()

        assert Child(use).wait() == 0
        assert [read_stamp(batch)[1] for batch in iteration] == [1, 2]
        with pytest.raises(sf.InputError, match="belongs to the process that made it"):
            pickle.dumps(batches)


class FailsToLoad:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)

    def __call__(self) -> Any:
        return []


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [(partial(int, 5), sf.InputError, "the loader is a int, which"), (FailsToLoad(), ValueError, "no number")],
)
def test_what_makes_the_loader_fails(make: Any, kind: type[Exception], text: str) -> None:
    with prefetch(make) as prefetcher:
        for _ in range(2):
            iteration = iter(prefetcher)
            with pytest.raises(kind, match=text):
                next(iteration)
            assert list(iteration) == []
        with pytest.raises((kind, TypeError)):
            len(prefetcher)


def odd_batches() -> Iterator[Any]:
    """A loader without a length, with a batch that cannot be sent."""
    yield torch.ones(1)
    yield {"lock": threading.Lock()}
    yield torch.ones(2)


def test_a_batch_that_cannot_be_sent_is_an_error_in_its_place() -> None:
    with prefetch(odd_batches) as prefetcher:
        with pytest.raises(TypeError, match="len"):
            len(prefetcher)
        iteration = iter(prefetcher)
        assert next(iteration).shape == (1,)
        with pytest.raises(TypeError, match="lock"):
            next(iteration)
        assert [batch.shape for batch in iteration] == [(2,)]


def test_its_loader_draws_a_seed_that_follows_from_torchs_generator_here() -> None:
    def order() -> list[int]:
        iteration = iter(prefetch(partial(sf.DataLoader, list(range(30)), 5, shuffle=True)))
        gc.collect()  # it lives as long as it is iterated: the fixture of all tests sees what is left
        return [id for batch in iteration for id in batch.tolist()]

    torch.manual_seed(1)
    first, second = order(), order()
    assert first != second
    torch.manual_seed(1)
    assert order() == first


def test_the_process_is_killed_or_ends() -> None:
    with stamped(batches=50) as prefetcher:
        iteration = iter(prefetcher)
        batch = next(iteration)
        os.kill(prefetcher.pid, signal.SIGKILL)
        until(lambda: gone(prefetcher.pid), "the process has died")
        with pytest.raises(sf.ProducerError, match="ended by SIGKILL"):
            deque(map(read_stamp, iteration), 0)  # what was ready when it died may still be given
        assert read_stamp(batch) == (0, 0)
        for call in (partial(next, iteration), lambda: next(iter(prefetcher))):
            with pytest.raises(sf.ProducerError):
                call()
    with prefetch(partial(os._exit, 7)) as prefetcher, pytest.raises(sf.ProducerError, match="exited with code 7"):
        list(prefetcher)


def started() -> set[int]:
    """Return the processes started as separate programs, and their forks, including orphans."""
    root, found = os.environ["STALLFREE_ROOT"], psutil.process_iter(["environ"])
    return {process.pid for process in found if (process.info["environ"] or {}).get("STALLFREE_ROOT") == root}


def train() -> None:
    process._START_METHOD = "spawn"  # the server is not its child
    for batch in stamped(batches=100_000):
        read_stamp(batch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_the_process_dies_at_random_moments(seed: int) -> None:
    chance = random.Random(seed)
    with stamped(chance.choice([1, 2, 5]), batches=100_000) as prefetcher:
        killer = threading.Timer(chance.random(), os.kill, (prefetcher.pid, signal.SIGKILL))
        killer.start()
        taken: list[tuple[int, int]] = []
        with pytest.raises(sf.ProducerError):
            taken.extend(map(read_stamp, prefetcher))
        killer.join()
        assert taken == [(0, number) for number in range(len(taken))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_who_made_it_dies_at_random_moments(seed: int) -> None:
    before = started()
    maker = Child(train)
    time.sleep(random.Random(seed).random() * 4)
    maker.kill()
    until(lambda: started() <= before, "the process has ended")
