"""`ProcessPrefetcher` yields the batches of its loader, with its errors in their places, and leaves nothing behind."""

import contextlib
import gc
import os
import pickle
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import PATIENCE, Script, gone, read_stamp, wait_for

import stallfree as sf
from children import Child
from stallfree.device import process


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts processes like "spawn", with the imports already done."""
    monkeypatch.setattr(process, "_START_METHOD", "forkserver")


def prefetch(make: Any, depth: int = 2) -> sf.ProcessPrefetcher[Any]:
    return sf.ProcessPrefetcher(make, "cpu", depth, timeout=PATIENCE)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return Script(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def served(script: Script) -> Iterator[sf.ProcessPrefetcher[Any]]:
    """The prefetcher of all tests that need no other, started by "spawn"."""
    torch.manual_seed(1)
    with prefetch(script) as prefetcher:
        len(prefetcher)
        yield prefetcher


def test_epochs_are_complete(script: Script, served: Any) -> None:
    script.write(batches=20)
    first = read_stamp(next(iter(served)))[0] + 1
    for epoch in range(first, first + 2):
        assert [read_stamp(batch) for batch in served] == [(epoch, number) for number in range(20)]
    assert len(served) == 20
    script.write(batches=0)
    assert list(served) == []
    assert len(served) == 0


def test_a_broken_off_epoch_leaves_nothing_behind(script: Script, served: Any) -> None:
    script.write(batches=9)
    epochs = []
    for take in (3, 9, 0, 9):
        iteration = iter(served)
        stamps = [read_stamp(next(iteration)) for _ in range(take)]
        assert [number for _, number in stamps] == list(range(take))
        epochs += [epoch for epoch, _ in stamps[:1]]
    assert sorted(set(epochs)) == epochs  # never a batch of an epoch before
    assert list(iteration) == []


def test_one_iteration_at_a_time_and_nothing_is_lost_silently(script: Script, served: Any) -> None:
    script.write(batches=3)
    first = iter(served)
    assert read_stamp(next(first))[1] == 0
    second = iter(served)
    assert read_stamp(next(second))[1] == 0
    for _ in range(2):
        with pytest.raises(sf.StallfreeError, match="iterated again"):
            next(first)
    assert [read_stamp(batch)[1] for batch in second] == [1, 2]
    with pytest.raises(sf.StallfreeError, match="iterated again"):
        list(zip(served, served, strict=True))
    third = iter(served)
    assert len(list(third)) == 3
    assert len(list(served)) == 3
    assert not list(third), "it had ended by itself"


def test_the_loader_is_no_further_ahead_than_it_may_be(script: Script, served: Any) -> None:
    """`depth` batches are ready, one is in use, and the process has taken one more from the loader."""
    counts = script.map()
    counts[0] = 0
    script.write(batches=30)
    for number, batch in enumerate(served):
        assert read_stamp(batch)[1] == number
        if number % 10 == 0:
            wait_for(lambda: counts[0] == min(30, number + 4), "the loader to be ahead")  # noqa: B023
    assert number == 29


def test_batches_may_be_kept_and_changed(script: Script, served: Any) -> None:
    script.write(batches=12)
    with torch.inference_mode():
        for batch in served:
            batch["pixels"].add_(1)
    for number, batch in enumerate(list(served)):
        assert read_stamp(batch)[1] == number
        assert not batch["pixels"].is_inference()
        assert batch["pixels"].is_shared()


@pytest.mark.parametrize("ends", [False, True])
def test_errors_of_the_loader_come_in_their_place(script: Script, served: Any, ends: bool) -> None:
    script.write(batches=8, errors=[0, 3, 4], ends=ends)
    iteration = iter(served)
    for number in [0] if ends else range(8):
        if number in (0, 3, 4):
            with pytest.raises(FileNotFoundError, match=f"no picture for batch {number}") as caught:
                next(iteration)
            assert caught.value.errno == 2
            assert "in __next__" in caught.value.__notes__[-1]
        else:
            assert read_stamp(next(iteration))[1] == number
    assert list(iteration) == []


def test_it_waits_no_longer_than_it_may(script: Script, served: Any) -> None:
    script.write(batches=6, hang=2)
    iteration = iter(served)
    assert [read_stamp(next(iteration))[1] for _ in range(2)] == [0, 1]
    served.timeout = 0.05
    for _ in range(2):
        with pytest.raises(sf.WaitError, match=r"0.05 s for batch 2 of the epoch"):
            next(iteration)
    served.timeout = PATIENCE
    script.release()
    assert [read_stamp(batch)[1] for batch in iteration] == [2, 3, 4, 5]


def test_a_forked_child_cannot_go_on_with_it(script: Script, served: Any) -> None:
    script.write(batches=3)
    iteration = iter(served)
    read_stamp(next(iteration))

    def use() -> None:
        for call in (partial(next, iteration), partial(iter, served)):
            with pytest.raises(sf.InputError, match=r"belongs to process \d+, and this process is a child of it"):
                call()
        served.close()

    assert Child(use).wait() == 0
    assert [read_stamp(batch)[1] for batch in iteration] == [1, 2]
    with pytest.raises(sf.InputError, match="belongs to the process that made it"):
        pickle.dumps(served)


# -- faults -----------------------------------------------------------------------------------------------------------


class Unsendable(Exception):
    """An error that cannot be sent."""

    def __init__(self) -> None:
        super().__init__("with a lock")
        self.lock = threading.Lock()


def raising(*_: Any) -> Any:
    raise Unsendable


class FailsToLoad:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return raising, ()

    def __call__(self) -> Any:
        return []


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [(partial(int, 5), sf.InputError, "the loader is a int, which"), (FailsToLoad(), Unsendable, "with a lock")],
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
        assert next(iteration).shape == (2,)
        assert list(iteration) == []


def test_a_loader_that_ends_its_process() -> None:
    with prefetch(partial(os._exit, 7)) as prefetcher, pytest.raises(sf.ProducerError, match="with exit code 7"):
        list(prefetcher)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"make_loader": [1]}, "make_loader=.*function without arguments"),
        ({"make_loader": lambda: [1]}, "top level of a module"),
        ({"depth": True}, "depth=True: give a whole number"),
        ({"timeout": 0}, "timeout=0: give the seconds"),
        ({"timeout": "5"}, "timeout='5'"),
        ({"device": "cpuu"}, "device='cpuu' is no device"),
        ({"device": "meta"}, "device='meta': processes share memory"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(sf.InputError, match=text):
        sf.ProcessPrefetcher(**({"make_loader": odd_batches, "device": "cpu"} | arguments))


# -- ends -------------------------------------------------------------------------------------------------------------


def shuffled() -> Any:
    return sf.DataLoader(list(range(30)), 5, shuffle=True)


def test_its_loader_draws_a_seed_that_follows_from_torchs_generator_here() -> None:
    def order() -> list[int]:
        iteration = iter(prefetch(shuffled))
        gc.collect()  # it lives as long as it is iterated: the fixture of all tests sees what is left
        return [id for batch in iteration for id in batch.tolist()]

    torch.manual_seed(1)
    first, second = order(), order()
    assert first != second
    torch.manual_seed(1)
    assert order() == first


def test_it_is_closed(tmp_path: Path) -> None:
    prefetcher = prefetch(Script(tmp_path))
    iteration = iter(prefetcher)
    next(iteration)
    prefetcher.close()
    prefetcher.close()
    assert list(iteration) == []
    for late in (iter, len):
        with pytest.raises(sf.ProducerError, match="has ended, or was closed"):
            late(prefetcher)  # type: ignore[operator]


def test_the_process_is_killed(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.write(batches=50)
    with prefetch(script) as prefetcher:
        iteration = iter(prefetcher)
        batch = next(iteration)
        os.kill(prefetcher.pid, signal.SIGKILL)
        wait_for(lambda: gone(prefetcher.pid), "the process to die")
        with pytest.raises(sf.ProducerError, match="has ended by signal 9"):
            deque(map(read_stamp, iteration), 0)  # what was ready when it died may still be given
        assert read_stamp(batch) == (0, 0)
        for call in (partial(next, iteration), lambda: next(iter(prefetcher))):
            with pytest.raises(sf.ProducerError):
                call()


def started() -> set[int]:
    """Return the processes started as separate programs, and their forks, including orphans."""
    mark, pids = f"STALLFREE_ROOT={os.environ['STALLFREE_ROOT']}".encode(), set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                pids.add(int(folder.name))
    return pids


def with_workers() -> Any:
    options: Any = {"num_workers": 2, "multiprocessing_context": "fork"}
    return torch.utils.data.DataLoader(range(10_000), 2, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_workers_of_the_loader_do_not_keep_it_alive() -> None:
    """Forked workers inherit their parent's memory, but not its connections."""
    before = started()
    with prefetch(with_workers) as prefetcher:
        iteration = iter(prefetcher)
        assert next(iteration).tolist() == [0, 1]
        os.kill(prefetcher.pid, signal.SIGKILL)
        with pytest.raises(sf.ProducerError, match="by signal 9"):
            list(iteration)
    wait_for(lambda: started() <= before, "the workers to end")


def train(make: Callable[[], Any]) -> None:
    process._START_METHOD = "spawn"  # the server is not its child
    for batch in prefetch(make):
        read_stamp(batch)


@pytest.mark.slow
def test_a_loader_that_hangs_is_ended(tmp_path: Path) -> None:
    script, before = Script(tmp_path), started()
    script.write(hang=2)
    with prefetch(script) as prefetcher:
        iteration = iter(prefetcher)
        assert [read_stamp(next(iteration))[1] for _ in range(2)] == [0, 1]
    maker, counts = Child(train, script), script.map()
    counts[0] = 0
    wait_for(lambda: counts[0] == 3, "the first batches")
    maker.kill()
    wait_for(lambda: started() <= before, "the process to end")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_the_process_dies_at_random_moments(tmp_path: Path, seed: int) -> None:
    """The batches are complete and in order, and an error follows."""
    chance, script = random.Random(seed), Script(tmp_path)
    script.write(batches=100_000)
    with prefetch(script, chance.choice([1, 2, 5])) as prefetcher:
        killer = threading.Timer(chance.random(), os.kill, (prefetcher.pid, signal.SIGKILL))
        killer.start()
        taken: list[tuple[int, int]] = []
        with pytest.raises(sf.ProducerError):
            taken.extend(map(read_stamp, prefetcher))
        killer.join()
        assert taken == [(0, number) for number in range(len(taken))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_who_made_it_dies_at_random_moments(tmp_path: Path, seed: int) -> None:
    """Killed before, during and after the start of the process: it ends."""
    script, before = Script(tmp_path), started()
    script.write(batches=100_000)
    maker = Child(train, script)
    time.sleep(random.Random(seed).random() * 4)
    maker.kill()
    wait_for(lambda: started() <= before, "the process to end")
