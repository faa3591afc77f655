"""The prefetcher on a GPU: `python -m pytest -m gpu tests/device`. Nothing here runs without one."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from process_tools import PATIENCE

import stallfree as sf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

LARGE = 300_000
"""Bytes of the leaf that has a copy of its own."""

MILLISECOND = 1_000_000
"""Cycles of `torch.cuda._sleep`, about."""


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Replaces the fixture of all tests: the driver opens descriptors and keeps them."""
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("stallfree"):
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"the test left the thread {thread.name} behind"


class Stamps:
    """`count` batches made of their number, in memory that is used again as soon as it may be.

    With `growing`, the large leaf is larger after each hundred batches.
    """

    def __init__(self, count: int, *, pinned: bool = False, growing: bool = False) -> None:
        self.count, self.growing = count, growing
        size = LARGE * (1 + count // 100 if growing else 1)
        self._large = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(1 if not pinned else 8)]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            large = self._large[number % len(self._large)]
            large = large[: LARGE * (1 + number // 100 if self.growing else 1)]
            large.fill_(number % 251)
            yield {
                "number": torch.full((64,), number),
                "pair": (torch.full((16, 8), float(number)), torch.tensor(number % 7, dtype=torch.int8)),
                "large": large,
            }


def wrong(batch: Any, number: int) -> torch.Tensor:
    """Count the wrong values of a batch on the device; the count stays there."""
    return (
        (batch["number"] != number).sum()
        + (batch["pair"][0] != float(number)).sum()
        + (batch["pair"][1] != number % 7).sum()
        + (batch["large"] != number % 251).sum()
    )


def test_a_hundred_thousand_batches_under_jitter() -> None:
    rng = torch.Generator().manual_seed(0)
    naps = torch.randint(0, 200_000, (997,), generator=rng).tolist()

    def jitter(batch: Any) -> Any:
        torch.cuda._sleep(naps[int(len(naps) * torch.rand((), generator=rng))] // 8)
        return batch

    prefetcher = sf.DevicePrefetcher(Stamps(100_000), "cuda", transform_on_device=jitter)
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    kept: list[tuple[int, Any]] = []
    count = 0
    for number, batch in enumerate(prefetcher):
        torch.cuda._sleep(naps[number % len(naps)] // 4)
        bad += wrong(batch, number)
        if number % 100 == 0:
            kept.append((number, batch))
            kept = kept[-20:]
        count += 1
    for number, batch in kept:
        bad += wrong(batch, number)
    assert count == 100_000
    assert bad.item() == 0


def test_iterations_at_once() -> None:
    batches = [torch.full((LARGE,), number, dtype=torch.uint8) for number in range(100)]
    prefetcher = sf.DevicePrefetcher(batches, "cuda", transform_on_device=lambda batch: batch.int())
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(3):
        for number, pair in enumerate(zip(prefetcher, prefetcher, strict=True)):
            torch.cuda._sleep(MILLISECOND // 10)
            for batch in pair:
                bad += (batch != number).sum()
    assert number == 99
    assert bad.item() == 0


def test_a_stream_of_ones_own() -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    iteration = iter(sf.DevicePrefetcher(Stamps(3000), "cuda"))
    for number in range(3000):
        stream = streams[number % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            batch = next(iteration)
            torch.cuda._sleep(20_000)
            bad += wrong(batch, number)
        torch.cuda.current_stream().wait_stream(stream)
    assert bad.item() == 0


def test_pinned_leaves_of_the_loader_are_read_in_place() -> None:
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    for number, batch in enumerate(sf.DevicePrefetcher(Stamps(2000, pinned=True), "cuda")):
        bad += wrong(batch, number)
    assert bad.item() == 0


def test_a_loaders_slots_are_pinned_and_copied_from() -> None:
    data = [(torch.full((3, 64, 64), id, dtype=torch.int32), id) for id in range(256)]
    with sf.DataLoader(data, batch_size=32, num_workers=2, device="cuda", persistent_workers=True) as loader:
        for _ in range(3):
            seen = 0
            for pictures, ids in loader:
                assert pictures.is_cuda
                assert (pictures == ids.view(-1, 1, 1, 1)).all()
                seen += len(ids)
            assert seen == 256
        assert loader._epochs.kept is not None
        slots = loader._epochs.kept.ring.slots
        assert slots._pinned
        view = torch.from_numpy(slots.view(next(iter(slots._pinned)), 1))
        assert view.is_pinned()


def test_reserved_memory_is_flat_over_fifty_epochs() -> None:
    prefetcher = sf.DevicePrefetcher(Stamps(200), "cuda")
    reserved = []
    for _ in range(50):
        for _ in prefetcher:
            torch.cuda._sleep(10_000)
        reserved.append(torch.cuda.memory_reserved())
    segment = 2 << 20  # what torch takes at a time; one more may be needed when the device is late
    assert max(reserved) - reserved[2] <= segment


def test_memory_that_cannot_be_pinned_is_no_error_of_the_next_kernel() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    one, other = (sf.DevicePrefetcher([], "cuda") for _ in range(2))
    undo, undo_nothing = one.pin(memory), other.pin(memory)
    assert torch.from_numpy(memory[4096:]).is_pinned()
    assert torch.ones(8, device="cuda").sum().item() == 8
    undo_nothing()
    assert torch.from_numpy(memory).is_pinned()
    undo()
    undo()
    assert not torch.from_numpy(memory).is_pinned()
    assert torch.ones(8, device="cuda").sum().item() == 8


def test_the_sanitizer_finds_nothing() -> None:
    program = """
    import torch, stallfree as sf
    from stallfree.device.ahead import LoaderThread
    from torch.cuda._sanitizer import cuda_sanitizer
    run = LoaderThread._run
    def watched(self, source):  # it watches the thread that imports torch, and no other
        with cuda_sanitizer.dispatch:
            run(self, source)
    LoaderThread._run = watched
    batches = [{"x": torch.full((300_000,), i % 100, dtype=torch.uint8), "y": torch.full((64,), i)} for i in range(200)]
    for _ in range(2):
        total = 0
        floats = lambda b: b | {"z": b["x"].float()}
        for batch in sf.DevicePrefetcher(batches, "cuda", transform_on_device=floats):
            total += batch["x"].sum() + batch["y"].sum() + batch["z"].sum()
        print(int(total))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
    )
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
    beside = sum(any(start < end_ and start_ < end for start_, end_ in steps) for start, end in copies)
    assert beside >= 15


def test_forked_workers_of_torch_survive_the_garbage_of_a_prefetcher() -> None:
    batches = list(range(12))
    for _ in range(3):
        prefetcher: Any = sf.DevicePrefetcher(Stamps(8), "cuda")
        prefetcher.itself = prefetcher  # freed by the garbage collector, in the parent or in a child
        assert len(list(prefetcher)) == 8
        del prefetcher
        loader = torch.utils.data.DataLoader(batches, 2, num_workers=2, collate_fn=collected)  # type: ignore[arg-type]
        assert [batch.tolist() for batch in loader] == [[id, id + 1] for id in range(0, 12, 2)]


def collected(samples: list[int]) -> torch.Tensor:
    """Collate after the garbage collector has run."""
    gc.collect()
    return torch.tensor(samples)


def make_stamps() -> Stamps:
    """The loader of a separate process."""
    return Stamps(300, growing=True)


def count_wrong(batches: Iterable[Any]) -> int:
    """Return the number of wrong values in two epochs of its batches."""
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(2):
        numbers = []
        for number, batch in enumerate(batches):
            torch.cuda._sleep(20_000)
            bad += wrong(batch, number)
            numbers.append(number)
        assert numbers == list(range(300))
    return int(bad.item())


@pytest.mark.parametrize("segments", ["expandable_segments:False", "expandable_segments:True"])
def test_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, segments: str) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", segments)
    with sf.ProcessPrefetcher(make_stamps, "cuda") as batches:
        assert count_wrong(batches) == 0
