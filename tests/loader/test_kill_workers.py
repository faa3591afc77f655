"""SIGKILL: of workers, of the training process, of another job. Nobody hangs, no sample is lost, repeated or wrong.

The ledger has a line (epoch, id, label, checksum of the pixels) for each sample that reached the loop.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import stallfree as sf
import train_job
from children import PATIENCE, Child, Holder, until
from loader_data import Made, checksum, loading, picture, pixels
from stallfree.ipc.folders import sweep
from stallfree.loader import executors as worker_processes
from train_job import SAMPLES, KeepAsIs, cached
from warm import Interpreter

Ledger = list[tuple[int, int, int, int]]


def expected(epochs: int) -> Ledger:
    return [(epoch, id, id, checksum(pixels(id))) for epoch in range(epochs) for id in range(SAMPLES)]


def book(ledger: Ledger, epoch: int, batch: sf.Batch) -> None:
    images, labels = batch.data
    for image, label, id in zip(images, labels.tolist(), batch.ids.tolist(), strict=True):
        ledger.append((epoch, id, label, checksum(image)))


def workers() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name.startswith("stallfree-worker")]


@contextlib.contextmanager
def a_killer(chance: random.Random) -> Iterator[threading.Event]:
    """Kills a random worker at a random instant after each time the event is set."""
    go, over = threading.Event(), threading.Event()

    def run() -> None:
        while go.wait() and not over.is_set():
            go.clear()
            time.sleep(chance.random() * 0.004)
            for worker in chance.sample(alive := workers(), min(1, len(alive))):
                with contextlib.suppress(ProcessLookupError, AttributeError, ValueError):
                    os.kill(worker.pid, signal.SIGKILL)

    killer = threading.Thread(target=run)
    killer.start()
    yield go
    over.set()
    go.set()
    killer.join()


@pytest.mark.parametrize(("method", "kills", "seed"), [
    ("fork", 8, 0), *(pytest.param(*way, 17, marks=pytest.mark.slow) for way in (("fork", 300), ("forkserver", 100))),
])  # fmt: skip
def test_workers_killed_at_random(method: str, kills: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "LIVES", 1000)  # chance may hit a batch more than three times
    chance = random.Random(seed)
    ledger: Ledger = []
    epoch = killed = 0
    options: dict[str, Any] = {"multiprocessing_context": method, "with_ids": True, "seed": seed}
    dataset = cached(transform=sf.mark_random(KeepAsIs()))
    with dataset, a_killer(chance) as kill, loading(dataset, 4, shuffle=True, num_workers=2, **options) as loader:
        while killed < kills:
            for batch in loader:
                book(ledger, epoch, batch)
                if killed < kills and chance.random() < 0.5:
                    killed += 1
                    kill.set()
                if chance.random() < 0.05:
                    dataset.cache.drop(batch.ids)  # so that workers go on writing
            epoch += 1
        stats = loader.stats()
        assert stats.samples == stats.hits + stats.misses == epoch * SAMPLES
        assert stats.workers_replaced > 0
        for id, value in enumerate(dataset.cache.get_many(range(SAMPLES))):
            if isinstance(value, tuple):
                assert value[1] == id
                assert checksum(value[0]) == checksum(pixels(id))
    assert sorted(ledger) == expected(epoch)


def deadly(id: int) -> torch.Tensor:
    if id == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.tensor(id)


def test_a_sample_that_kills_its_worker() -> None:
    said = r"3 worker .* on batch 2 of epoch 0.*\[4, 5\].* SIGKILL, as the system does"
    with loading(Made(20, deadly), 2, num_workers=2) as loader:
        iterator = iter(loader)
        assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1], [2, 3]]
        with pytest.raises(sf.WorkerError, match=said) as caught:
            next(iterator)
        assert caught.value.ids == [4, 5]
        # The loop may go on with the batches that follow.
        assert [batch.tolist() for batch in iterator] == [[id, id + 1] for id in range(6, 20, 2)]
        assert loader.stats().workers_replaced == 3


def test_workers_that_cannot_even_start() -> None:
    """What a worker cannot unpickle kills it before it has done anything: an error, and no other worker is started."""
    with sf.DataLoader(Made(4, Unloadable()), num_workers=1, multiprocessing_context="forkserver") as loader:
        with pytest.raises(sf.WorkerError, match="at its start"):
            next(iter(loader))
        assert loader.stats().workers_replaced == 0


class Unloadable:
    """Can be sent to a worker, and cannot be loaded there."""

    def __reduce__(self) -> Any:
        return divmod, (1, 0)

    def __call__(self, id: int) -> Any:
        return id


def test_idle_workers_that_die() -> None:
    with loading(Made(8, picture), 4, num_workers=2) as loader:
        list(loader)
        for worker in workers():
            worker.kill()
            worker.join()
        assert len(list(loader)) == 2
        assert loader.stats().workers_replaced == 2


def test_a_worker_that_is_stopped_does_not_hold_up_the_loops_sends() -> None:
    """The trainer gives it tasks and gives up on it in time, though nobody reads them."""
    count = 200_000
    batches = [[0], *([range(count)] * 3)]
    with loading(Made(count, torch.tensor), batch_sampler=batches, num_workers=1, timeout=0.5) as loader:
        iterator = iter(loader)
        (worker,) = workers()
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(sf.WaitError, match=f"worker process {worker.pid}, alive"):
            list(iterator)
        worker.kill()  # what the end of the loader would do after 5 s


@contextlib.contextmanager
def forked_job() -> Iterator[Child]:
    """A running job that has said "ready"."""
    read, write = os.pipe()

    def run() -> None:
        os.setsid()
        os.dup2(write, 1)
        sys.stdout = os.fdopen(1, "w")
        train_job.main("fork", 1000)

    child = Child(run)
    os.close(write)
    try:
        assert os.read(read, 100) == b"ready\n"
        yield child
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            child.kill()


@contextlib.contextmanager
def job(method: str) -> Iterator[subprocess.Popen[str]]:
    """A running job of another interpreter, which has said "ready"."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, train_job.__file__, method, "1000"], start_new_session=True, **pipes)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "ready\n", process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
    assert not alive


@pytest.mark.parametrize(
    "method", [None, *(pytest.param(way, marks=pytest.mark.slow) for way in ("fork", "forkserver", "spawn"))]
)
def test_the_trainer_is_killed(method: str | None, store_root: Path) -> None:
    """A forked one, or one of another interpreter."""
    with forked_job() if method is None else job(method) as process:
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        assert len(list(store_root.iterdir())) == 2  # the cache and the ring
        process.kill()
        if isinstance(process, subprocess.Popen):
            process.wait()
        wait_until_gone(family)
    with cached() as dataset, sf.DataLoader(dataset, 4, num_workers=1) as loader:
        assert len(list(loader)) == SAMPLES // 4
    sweep(store_root)
    assert not list(store_root.iterdir())


def test_a_loader_sweeps_what_killed_ones_left(store_root: Path) -> None:
    """Also when there is no cache."""
    kept: list[Any] = []

    def begin() -> Callable[[], None]:
        kept.append(iter(sf.DataLoader(Made(100, picture), 4, num_workers=2, multiprocessing_context="fork")))
        next(kept[0])
        return kept.clear

    holder = Holder(begin)
    family = psutil.Process(holder.pid).children(recursive=True)
    holder.kill()
    wait_until_gone(family)
    assert len(list(store_root.iterdir())) == 1  # the ring
    list(sf.DataLoader(Made(4, picture), num_workers=1))
    assert not list(store_root.iterdir())


def test_leaving_in_the_midst_of_an_epoch(store_root: Path, interpreter: Interpreter) -> None:
    done = interpreter.run(Path(train_job.__file__), "fork", "1000", "exit")
    assert (done.code, done.out, done.err) == (0, "ready\n", "")
    assert [path.name for path in store_root.iterdir() if path.name.startswith("ring-")] == []
    sweep(store_root)
    assert not list(store_root.iterdir())


@pytest.mark.parametrize(
    ("seed", "kills"), [(0, 1), *(pytest.param(seed, 2, marks=pytest.mark.slow) for seed in range(2))]
)
def test_a_second_job_on_the_same_cache_is_killed(seed: int, kills: int, store_root: Path) -> None:
    chance = random.Random(seed)
    ledger: Ledger = []
    dataset = cached(transform=sf.mark_random(KeepAsIs()))
    with dataset, loading(dataset, 4, shuffle=True, num_workers=2, with_ids=True) as loader:
        for epoch in range(2 + 2 * kills):
            if epoch in (1, 3):
                last = chance.randrange(3, 20)
                with forked_job() as process:
                    for number, batch in enumerate(loader):
                        book(ledger, epoch, batch)
                        dataset.cache.drop(batch.ids)  # so that both go on writing
                        if number == last:
                            process.kill()
            else:
                for batch in loader:
                    book(ledger, epoch, batch)
        assert sorted(ledger) == expected(2 + 2 * kills)
        stats = loader.stats()
        assert stats.hits + stats.misses == (2 + 2 * kills) * SAMPLES
    until(lambda: not sweep(store_root) and not list(store_root.iterdir()))  # the killed job's workers still end
