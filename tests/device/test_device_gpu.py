"""The prefetchers on a GPU: `python -m pytest -m gpu tests/device`. Nothing here runs without one."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import psutil
import pytest
import torch

import stallfree as sf
from children import gone, until
from loader_data import Made
from on_gpu import needs_gpu, no_leaks  # noqa: F401

pytestmark = needs_gpu
LARGE = 300_000  # bytes of the leaf that has a copy of its own
MILLISECOND = 1_000_000  # cycles of `torch.cuda._sleep`, about
SAMPLES, BATCH = 192, 32
IN_ORDER = [list(range(at, at + BATCH)) for at in range(0, SAMPLES, BATCH)]  # ids of an epoch that is not shuffled


class Stamps:
    """`count` batches made of their number, in memory that is used again as soon as it may be. The large leaf may be
    `growing` after each hundred batches.
    """

    def __init__(self, count: int, growing: bool = False) -> None:
        self.count, self.growing = count, growing
        self._large = torch.empty(self._size(count), dtype=torch.uint8)

    def _size(self, number: int) -> int:
        return LARGE * (1 + number // 100 if self.growing else 1)

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            yield {
                "number": torch.full((64,), number),
                "pair": (torch.full((16, 8), float(number)), torch.tensor(number % 7, dtype=torch.int8)),
                "large": self._large[: self._size(number)].fill_(number % 251),
            }


def wrong(batch: Any, number: int) -> torch.Tensor:
    """Count the wrong values of a batch on the device; the count stays there."""
    return (
        (batch["number"] != number).sum() + (batch["pair"][0] != float(number)).sum()
        + (batch["pair"][1] != number % 7).sum() + (batch["large"] != number % 251).sum()
    )  # fmt: skip


def test_a_hundred_thousand_batches_under_jitter() -> None:
    rng = torch.Generator().manual_seed(0)
    naps = torch.randint(0, 200_000, (997,), generator=rng).tolist()

    def jitter(batch: Any) -> Any:
        torch.cuda._sleep(naps[int(len(naps) * torch.rand((), generator=rng))] // 8)
        return batch

    prefetcher = sf.DevicePrefetcher(Stamps(100_000), "cuda", transform_on_device=jitter)
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    kept: list[tuple[int, Any]] = []
    for number, batch in enumerate(prefetcher):
        torch.cuda._sleep(naps[number % len(naps)] // 4)
        bad += wrong(batch, number)
        if number % 100 == 0:
            kept = [*kept[-19:], (number, batch)]
    assert number == 99_999
    for number, batch in kept:
        bad += wrong(batch, number)
    assert bad.item() == 0


def test_reserved_memory_is_flat_over_fifty_epochs() -> None:
    prefetcher = sf.DevicePrefetcher(Stamps(200), "cuda")
    reserved = []
    for _ in range(50):
        for _ in prefetcher:
            torch.cuda._sleep(10_000)
        reserved.append(torch.cuda.memory_reserved())
    segment = 2 << 20  # what torch takes at a time; one more may be needed when the device is late
    assert max(reserved) - reserved[2] <= segment


def test_the_sanitizer_finds_nothing() -> None:
    program = """
    import torch, stallfree as sf
    from stallfree.device.ahead import LoaderThread
    from torch.cuda._sanitizer import cuda_sanitizer
    run = LoaderThread._run
    def watched(self):  # it watches the thread that imports torch, and no other
        with cuda_sanitizer.dispatch: run(self)
    LoaderThread._run = watched
    batches = [{"x": torch.full((300_000,), i % 100, dtype=torch.uint8), "y": torch.full((64,), i)} for i in range(200)]
    for _ in range(2):
        total = 0
        for batch in sf.DevicePrefetcher(batches, "cuda", transform_on_device=lambda b: b | {"z": b["x"].float()}):
            total += batch["x"].sum() + batch["y"].sum() + batch["z"].sum()
        print(int(total))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "data race" not in done.stderr.lower() + done.stdout.lower()
    assert len(set(done.stdout.split())) == 1


def test_copies_and_steps_overlap_in_a_trace() -> None:
    batches = [torch.full((8 << 20,), number % 100, dtype=torch.uint8) for number in range(20)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in sf.DevicePrefetcher(batches, "cuda"):
            torch.cuda._sleep(10 * MILLISECOND)
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profile.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["HtoD" in event.name].append((event.time_range.start, event.time_range.end))
    copies, steps = spans[True], [span for span in spans[False] if span[1] - span[0] > 1000]
    assert len(copies) >= 20
    assert sum(any(start < end_ and start_ < end for start_, end_ in steps) for start, end in copies) >= 15


@pytest.mark.parametrize("segments", ["expandable_segments:False", "expandable_segments:True"])
def test_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, segments: str) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", segments)
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    with sf.ProcessPrefetcher(partial(Stamps, 300, growing=True), "cuda") as batches:
        for _ in range(2):
            for number, batch in enumerate(batches):
                torch.cuda._sleep(20_000)
                bad += wrong(batch, number)
            assert number == 299
        assert bad.item() == 0


def picture(id: int) -> tuple[torch.Tensor, int]:
    """A picture filled with its number, and that number. The pictures of a batch have a copy of their own."""
    return torch.full((3, 64, 64), id % 251, dtype=torch.uint8), id


def ids_of(batches: Iterable[Any], end: int | None = None) -> list[list[int]]:
    """Return the numbers of each batch, which must be on the GPU and complete; break after `end` batches."""
    found: list[list[int]] = []
    for pictures, ids in itertools.islice(batches, end):
        assert pictures.device.type == ids.device.type == "cuda"
        assert (pictures == (ids % 251).to(pictures.dtype).view(-1, 1, 1, 1)).all()
        found.append(ids.tolist())
    return found


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_are_forked_after_the_gpu_was_used_and_their_slots_are_pinned(persistent: bool) -> None:
    """Epochs that are broken off leave no memory."""
    assert torch.ones(8, device="cuda").sum().item() == 8
    before = torch.cuda.memory_allocated()
    options: dict[str, Any] = {"persistent_workers": persistent, "multiprocessing_context": "fork"}
    with sf.DataLoader(Made(SAMPLES, picture), BATCH, num_workers=2, device="cuda", **options) as loader:
        for end in [1, 3, 5] * 3:
            assert ids_of(loader, end) == IN_ORDER[:end]
        assert ids_of(loader) == IN_ORDER
        if persistent:
            assert loader._epochs.kept is not None
            slots = loader._epochs.kept.ring.slots
            assert torch.from_numpy(slots.view(next(iter(slots._pinned)), 1)).is_pinned()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_a_graph_is_captured_while_batches_are_copied() -> None:
    captures, asked = threading.Event(), []

    def batches() -> Iterator[torch.Tensor]:
        for number in range(12):
            asked.append(number)
            yield torch.full((LARGE,), float(number))
            captures.wait(10)

    static = torch.zeros(LARGE, device="cuda")
    (static * 2).sum()  # loads the kernels
    iteration = iter(sf.DevicePrefetcher(batches(), "cuda", depth=8))
    first = next(iteration)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captures.set()
        doubled = static * 2
        until(lambda: len(asked) > 5, "batches 1 to 4 are copied")
        total = doubled.sum()
    sums = []
    for batch in itertools.chain([first], iteration):
        static.copy_(batch)
        graph.replay()
        sums.append(total.clone())
    assert torch.stack(sums).tolist() == [2.0 * LARGE * number for number in range(12)]


def test_the_process_that_loads_is_killed() -> None:
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
    with sf.ProcessPrefetcher(partial(sf.DataLoader, Made(9600, picture), BATCH, **options), "cuda") as prefetcher:
        iteration = iter(prefetcher)
        assert ids_of(iteration, 3) == IN_ORDER[:3]
        workers = psutil.Process(prefetcher.pid).children()
        os.kill(prefetcher.pid, signal.SIGKILL)
        until(lambda: gone(prefetcher.pid), "the process has died")
        begun = time.monotonic()
        with pytest.raises(sf.ProducerError, match="ended by SIGKILL"):
            deque(iteration, 0)
        assert time.monotonic() - begun < 10
        until(lambda: all(gone(worker.pid) for worker in workers), "its workers have ended")
        assert len(workers) == 2
    assert torch.ones(8, device="cuda").sum().item() == 8
