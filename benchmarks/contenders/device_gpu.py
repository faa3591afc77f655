"""Prefetchers on a GPU: those of stallfree, and the published disciplines of others, with equal batches and steps.

The other ways are written here after their published descriptions: torch's `pin_memory=True` and `.to(non_blocking)`
in the current stream; timm's `PrefetchLoader` (the next batch is copied in a second stream, for which the current one
waits before it is given out); Apex's `data_prefetcher` (the same, with `record_stream`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import stallfree as sf
from benchmarks.contender import emit

Json = dict[str, Any]
Batches = Iterable[Any]


class Ready(torch.utils.data.Dataset[Any]):
    """Batches that are there already: `count` of `size` bytes."""

    def __init__(self, size: int, count: int) -> None:
        self.count = count
        self._batch = torch.randint(0, 255, (size,), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return self._batch, torch.full((256,), number)


def loader(size: int, count: int, workers: int, *, pin: bool) -> Batches:
    """torch's own loader of such batches."""
    return torch.utils.data.DataLoader(
        Ready(size, count), batch_size=None, num_workers=workers, pin_memory=pin, prefetch_factor=4
    )


def plain(batches: Batches) -> Iterator[Any]:
    """`.to(non_blocking=True)` of pinned batches, in the current stream."""
    for batch in batches:
        yield [leaf.to("cuda", non_blocking=True) for leaf in batch]


def second_stream(batches: Batches, *, record: bool) -> Iterator[Any]:
    """The next batch is copied in a second stream while the model works: timm's and, with `record`, Apex's way."""
    stream = torch.cuda.Stream()
    last = None
    for batch in batches:
        with torch.cuda.stream(stream):
            sent = [leaf.to("cuda", non_blocking=True) for leaf in batch]
        if last is not None:
            yield last
        torch.cuda.current_stream().wait_stream(stream)
        if record:
            for leaf in sent:
                leaf.record_stream(torch.cuda.current_stream())
        last = sent
    if last is not None:
        yield last


WAYS: dict[str, Callable[[int, int, int], Batches]] = {
    "`DevicePrefetcher`": lambda size, count, workers: sf.DevicePrefetcher(
        loader(size, count, workers, pin=False), "cuda"
    ),
    "torch, pinned": lambda size, count, workers: plain(loader(size, count, workers, pin=True)),
    "timm's way": lambda size, count, workers: second_stream(loader(size, count, workers, pin=True), record=False),
    "Apex's way": lambda size, count, workers: second_stream(loader(size, count, workers, pin=True), record=True),
}


def cycles_of(seconds: float) -> int:
    """Cycles of `torch.cuda._sleep` that take so long."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1_000_000)
    start.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    torch.cuda.synchronize()
    return int(100_000_000 * seconds * 1000 / start.elapsed_time(end))


def step_seconds(batches: Batches, cycles: int, skip: int) -> float:
    """Seconds per step, the first `skip` not counted."""
    begun, count = 0.0, 0
    for number, _ in enumerate(batches):
        if number == skip:
            torch.cuda.synchronize()
            begun, count = time.perf_counter(), -1
        torch.cuda._sleep(cycles)
        count += 1
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / (count + 1)


def copy_seconds(source: torch.Tensor, times: int = 50) -> float:
    """Seconds for one copy of `source` to the device."""
    target = torch.empty_like(source, device="cuda")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    target.copy_(source, non_blocking=True)
    start.record()
    for _ in range(times):
        target.copy_(source, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / times


@contextmanager
def own_loader(given: Json) -> Iterator[Batches]:
    """stallfree's loader of batches of the same size, out of its cache, which is filled."""
    pictures = [(torch.randint(0, 255, (3, 224, 224), dtype=torch.uint8), id) for id in range(2048)]
    size = pictures[0][0].nbytes
    batch = given["size"] // size
    order = [id % len(pictures) for id in range(given["count"] * batch)]
    with (
        sf.CachedDataset(pictures, capacity=2 * len(pictures) * size) as cached,
        sf.DataLoader(
            cached, batch, sampler=order, num_workers=given["workers"], persistent_workers=True, device="cuda"
        ) as own,
    ):
        for _ in own:
            pass
        yield own


def steps(given: Json) -> Json:
    """Seconds per step by each way, in turns, for each length of the step."""
    found: Json = {}
    size, threads = given["size"], torch.get_num_threads()
    with own_loader(given) as own:
        ways = {"`sf.DataLoader`": lambda *_: own} | WAYS
        for milliseconds in given["steps"]:
            cycles = cycles_of(milliseconds / 1000)
            each: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(given["rounds"]):
                for name, make in ways.items():
                    torch.set_num_threads(threads)  # the thread that pins sets 1, for all threads made after it
                    each[name].append(step_seconds(make(size, given["count"], given["workers"]), cycles, 20))
            bare = step_seconds([None] * given["count"], cycles, 20)
            found[str(milliseconds)] = {"seconds": each, "bare": bare}
    copy = copy_seconds(torch.empty(size, dtype=torch.uint8, pin_memory=True))
    return {"steps": found, "copy": copy}


def bandwidth(given: Json) -> Json:
    """Seconds per copy out of a slot of our loader's ring, and out of pinned memory of torch's, in turns."""
    size = given["size"]
    data = [torch.zeros(size // 8, dtype=torch.uint8) for _ in range(8)]
    found: dict[str, list[float]] = {"slot": [], "pinned": []}
    with sf.DataLoader(data, batch_size=8, num_workers=1, device="cuda", persistent_workers=True) as ours:
        for _ in ours:
            pass
        assert ours._epochs.kept is not None
        slots = ours._epochs.kept.ring.slots
        slot = torch.from_numpy(slots.view(next(iter(slots._pinned)), size)[:size])
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        assert slot.is_pinned()
        for _ in range(given["rounds"]):
            found["slot"].append(copy_seconds(slot))
            found["pinned"].append(copy_seconds(pinned))
    return found


def host_time(given: Json) -> Json:
    """Microseconds of processor time per batch of a dict of 20 leaves: of the training loop, and of both threads."""
    batch = {f"leaf {number}": torch.randn(64, 8) for number in range(20)}
    iteration = iter(sf.DevicePrefetcher([batch] * 3000, "cuda"))
    for _ in range(500):
        next(iteration)
    used, loop = time.process_time(), time.thread_time()
    for _ in range(2000):
        next(iteration)
    return {
        "loop": (time.thread_time() - loop) / 2000 * 1e6,
        "both": (time.process_time() - used) / 2000 * 1e6,
    }


def training(given: Json) -> Json:
    """Seconds per step of a ResNet-50 on pictures in a cache, against the same steps on one batch that stays."""
    from benchmarks.contenders.resnet50 import make_resnet50

    count, batch_size, workers = given["pictures"], given["batch"], given["workers"]
    pictures = [(torch.randint(0, 255, (3, 224, 224), dtype=torch.uint8), id % 1000) for id in range(count)]
    model = make_resnet50().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    mean, deviation = (torch.tensor(each, device="cuda").view(3, 1, 1) for each in ((124.0, 116, 104), (58.0, 57, 57)))

    def prepared(batch: Any) -> Any:
        images, labels = batch
        return ((images.float() - mean) / deviation).to(memory_format=torch.channels_last), labels

    def train(images: Any, labels: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    cached = sf.CachedDataset(pictures, capacity="8GiB", name="pictures")
    common: Json = {"batch_size": batch_size, "shuffle": True, "num_workers": workers, "drop_last": True}
    ours = sf.DataLoader(cached, device="cuda", persistent_workers=True, **common)
    torchs = torch.utils.data.DataLoader(pictures, pin_memory=True, persistent_workers=True, **common)
    ways: dict[str, Callable[[], Iterator[Any]]] = {
        "stallfree": lambda: map(prepared, iter(ours)),
        "torch": lambda: map(prepared, plain(torchs)),
        "one batch that stays": lambda: iter([standing] * (count // batch_size)),
    }
    standing = prepared([leaf.cuda() for leaf in torch.utils.data.default_collate(pictures[:batch_size])])
    for _ in range(20):
        train(*standing)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given["rounds"] + 1):
        for name, batches in ways.items():
            torch.cuda.synchronize()
            begun, steps_ = time.perf_counter(), 0
            for images, labels in batches():
                train(images, labels)
                steps_ += 1
            torch.cuda.synchronize()
            found[name].append((time.perf_counter() - begun) / steps_)
    ours.close()
    cached.close()
    return {name: seconds[1:] for name, seconds in found.items()}


def main() -> None:
    given = json.loads(sys.argv[1])
    found = {part.__name__: part(given) for part in (steps, bandwidth, host_time, training)}
    emit({"found": found, "device": torch.cuda.get_device_name()}, torch=torch.__version__)


if __name__ == "__main__":
    main()
