"""Is the GPU busy? Without a GPU the cases run on the processor, to see that they work."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stallfree as sf
from benchmarks.data import FromFunction
from benchmarks.harness import Case, Condition, Contender, Figure
from benchmarks.photos import photos
from benchmarks.timing import find_photos

Figures = dict[str, Any]
Batches = Iterable[Any]
SIDE = 224
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def finish() -> None:
    """Wait for the device."""
    if ON_GPU:
        torch.cuda.synchronize()


# -- copies and steps -------------------------------------------------------------------------------------------------


def sent(batches: Batches) -> Iterator[Any]:
    """`.to(non_blocking=True)` of pinned batches, in the current stream."""
    for batch in batches:
        yield [leaf.to(DEVICE, non_blocking=True) for leaf in batch]


def second_stream(batches: Batches, record: bool) -> Iterator[Any]:
    """Copies the next batch in a second stream, as timm's `PrefetchLoader` and, with `record`, Apex's prefetcher."""
    stream, last = torch.cuda.Stream(), None
    for batch in batches:
        with torch.cuda.stream(stream):
            copies = [leaf.to(DEVICE, non_blocking=True) for leaf in batch]
        if last is not None:
            yield last
        torch.cuda.current_stream().wait_stream(stream)
        for leaf in copies if record else []:
            leaf.record_stream(torch.cuda.current_stream())
        last = copies
    yield last


@contextlib.contextmanager
def open_batches(way: str, size: int, count: int, workers: int) -> Iterator[Batches]:
    """Batches of `size` bytes on the device, by one of the ways."""
    if way != "stallfree":
        ready = torch.randint(0, 255, (size,), dtype=torch.uint8), torch.arange(256)
        pin = ON_GPU and way != "prefetcher"
        loader: Any = torch.utils.data.DataLoader(
            FromFunction(count, lambda _: ready),
            batch_size=None,
            num_workers=workers,
            pin_memory=pin,
            prefetch_factor=4,
        )
        if way == "prefetcher":
            yield sf.DevicePrefetcher(loader, DEVICE)
        else:
            yield sent(loader) if way == "torch" or not ON_GPU else second_stream(loader, way == "apex")
        return
    pictures = [(torch.randint(0, 255, (3, SIDE, SIDE), dtype=torch.uint8), id) for id in range(2048 if ON_GPU else 64)]
    batch = size // pictures[0][0].nbytes
    order = [id % len(pictures) for id in range(count * batch)]
    with (
        sf.CachedDataset(pictures, capacity=2 * len(pictures) * pictures[0][0].nbytes) as cached,
        sf.DataLoader(cached, batch, sampler=order, num_workers=workers, persistent_workers=True, device=DEVICE) as own,
    ):
        for _batch in own:
            pass
        yield own


def copies(way: str, pictures: int, count: int, workers: int, step: float, skip: int = 20) -> Figures:
    """Milliseconds per step of `step` seconds, with batches of pictures; the first steps are not counted."""
    cycles = cycles_of(step) if ON_GPU else 0
    with open_batches(way, pictures * 3 * SIDE * SIDE, count, workers) as batches:
        begun = number = 0.0
        for number, _batch in enumerate(batches):
            if number == skip:
                finish()
                begun = time.perf_counter()
            if ON_GPU:
                torch.cuda._sleep(cycles)
            else:
                time.sleep(step)
        finish()
        taken = (time.perf_counter() - begun) / (number - skip)
    return {"ms": 1000 * taken, "of_bound": step / taken}


def cycles_of(seconds: float) -> int:
    """Return the cycles of `torch.cuda._sleep` that take so long."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1_000_000)
    start.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    finish()
    return int(100_000_000 * seconds * 1000 / start.elapsed_time(end))


# -- training ---------------------------------------------------------------------------------------------------------


class Trainer:
    """A ResNet-50 that trains on bytes (batch, height, width, 3) and labels; a tiny network without a GPU."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.backends.cudnn.benchmark = True
        if ON_GPU:
            from torchvision.models import resnet50

            self.model: Any = resnet50().to(DEVICE)
        else:
            self.model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1000))
        self.model.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self, pictures: torch.Tensor, labels: torch.Tensor) -> None:
        """One step; does not wait for the device."""
        images = ((pictures.float() - 116) / 58).permute(0, 3, 1, 2)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def bare_seconds(self, batch: int, steps: int) -> float:
        """Seconds per step on one batch that stays on the device."""
        pictures = torch.randint(0, 255, (batch, SIDE, SIDE, 3), dtype=torch.uint8, device=DEVICE)
        labels = torch.arange(batch, device=DEVICE)
        for _ in range(steps):
            self.step(pictures, labels)
        finish()
        begun = time.perf_counter()
        for _ in range(steps):
            self.step(pictures, labels)
        finish()
        return (time.perf_counter() - begun) / steps

    def epoch(self, batches: Batches) -> tuple[float, float, int]:
        """Seconds of an epoch to the end of its first step and in all, and its steps."""
        finish()
        begun, first, steps = time.perf_counter(), 0.0, 0
        for pictures, labels in batches:
            self.step(pictures, labels)
            steps += 1
            if steps == 1:
                finish()
                first = time.perf_counter() - begun
        finish()
        return first, time.perf_counter() - begun, steps


def train_on_photos(
    photos: str, way: str, form: str, count: int, batch: int, workers: int, bandwidth: float, epochs: int, short: bool
) -> Figures:
    """Pictures/s, and the fraction of an epoch in which the GPU works: by its time on a batch that stays on it.

    `way` is "stallfree" (a cache of `form` over slow storage), "torch" (slow storage; the first epoch counts) or "warm"
    (torch's loader on files in memory).
    """
    paths = find_photos(photos)
    paths = (paths * -(-count // len(paths)))[:count]
    labels = [id % 1000 for id in range(count)]
    files: Any = sf.FileDataset(paths, labels, sf.DecodeRandomResizedCrop(SIDE, flip=0.5))
    slow: Any = sf.testing.ThrottledSource(files, bandwidth=bandwidth)
    options: Figures = {"batch_size": batch, "shuffle": True, "num_workers": workers, "persistent_workers": True}
    options["drop_last"] = True
    trainer = Trainer()
    bare = trainer.bare_seconds(batch, 2 if short else 20)
    with contextlib.ExitStack() as stack:
        if way == "stallfree":
            capacity = count * (SIDE * SIDE * 14 if form == "prepared" else 200_000) + (64 << 20)
            cached = stack.enter_context(sf.CachedDataset(slow, capacity=capacity, form=form))
            own: Any = stack.enter_context(sf.DataLoader(cached, device=DEVICE, **options))
            start: Callable[[], Batches] = lambda: own  # noqa: E731
        else:
            source = slow if way == "torch" else files
            loader: Any = torch.utils.data.DataLoader(source, pin_memory=ON_GPU, **options)
            start = lambda: sent(loader)  # noqa: E731
        runs = [trainer.epoch(start()) for _ in range(1 if way == "torch" else 1 + epochs)]
    kept = runs if way == "torch" else runs[1:]
    return {
        "rate": [steps * batch / seconds for _, seconds, steps in kept],
        "busy": [bare * steps / seconds for _, seconds, steps in kept],
        "first": [1000 * first for first, _, _ in kept],
        "first_epoch": runs[0][1],
    }


# -- where photographs are decoded ------------------------------------------------------------------------------------


def set_cores(cores: int) -> None:
    """Let all threads of this process, and those that they start, run on so many cores."""
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), chosen)


def read_encoded(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def as_lists(samples: list[Any]) -> Any:
    return [data for data, _ in samples], torch.tensor([label for _, label in samples])


def decoded_by_torchvision(batches: Batches) -> Iterator[Any]:
    """Decode a batch on the device, then crop, resize and mirror picture by picture."""
    from torchvision.io import decode_jpeg
    from torchvision.transforms import v2

    cut = v2.Compose([v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip()])
    for files, labels in batches:
        pictures = torch.stack([cut(picture) for picture in decode_jpeg(files, device=DEVICE)])
        yield pictures.permute(0, 2, 3, 1), labels.to(DEVICE)


def decode_on(photos: str, where: str, cores: int, batch: int, seconds: float, short: bool) -> Figures:
    """Pictures/s of a loader alone and with a ResNet-50, if photographs in memory are decoded on "cpu" or "gpu"."""
    trainer = Trainer()
    bare = trainer.bare_seconds(batch, 2 if short else 20)
    set_cores(cores)
    paths = find_photos(photos) * (4 if short else 40)
    options: Figures = {"num_workers": cores, "persistent_workers": True, "shuffle": True, "drop_last": True}
    if where == "torchvision":
        made: Any = torch.utils.data.DataLoader(
            FromFunction(len(paths), lambda id: (read_encoded(paths[id]), id % 1000)),
            batch,
            collate_fn=as_lists,
            prefetch_factor=4,
            **options,
        )
        start: Callable[[], Batches] = lambda: decoded_by_torchvision(made)  # noqa: E731
    else:
        crop = sf.DecodeRandomResizedCrop(SIDE, flip=0.5, on_device=where == "gpu")
        data = sf.FileDataset(paths, [id % 1000 for id in range(len(paths))], crop)
        made = sf.DataLoader(data, batch, device=DEVICE, **options)
        start = lambda: made  # noqa: E731
    alone, trained = (batch / _step_seconds(start(), step, seconds) for step in (None, trainer.step))
    return {"trained": trained, "busy": bare * trained / batch, "alone": alone}


def _step_seconds(batches: Batches, step: Any, seconds: float, warm: int = 5) -> float:
    steps, begun = 0, 0.0
    for number, (pictures, labels) in enumerate(batches):
        if number == warm:
            finish()
            begun, steps = time.perf_counter(), 0
        if step is not None:
            step(pictures, labels)
        steps += 1
        if number > warm and time.perf_counter() > begun + seconds:
            break
    finish()
    return (time.perf_counter() - begun) / steps


# -- cases ------------------------------------------------------------------------------------------------------------

HERE = "benchmarks.questions.device"


def way(key: str, title: str) -> Contender:
    return Contender(key, title, f"{HERE}:copies", {"way": key})


def trained(key: str, title: str, way: str, form: str = "") -> Contender:
    return Contender(key, title, f"{HERE}:train_on_photos", {"way": way, "form": form})


def decoder(key: str, title: str) -> Contender:
    return Contender(key, title, f"{HERE}:decode_on", {"where": key})


CASES = {
    "device_gpu": Case(
        question="How long is a training step on a GPU when batches of 38 MB are prefetched, against the longer of "
        "copy and step?",
        setup="A step is `torch.cuda._sleep`. `sf.DataLoader` gathers the batches from its cache with 4 workers; the "
        "other ways get ready batches by torch's loader with 4 workers, which pins them for all but "
        "`DevicePrefetcher`. timm's and Apex's ways are their published disciplines, written for this benchmark.",
        contenders=[
            way("stallfree", "stallfree DataLoader"),
            way("prefetcher", "stallfree DevicePrefetcher"),
            way("torch", "torch, pinned"),
            way("timm", "timm's way"),
            way("apex", "Apex's way"),
        ],
        figures={"ms": Figure("ms per step", ".2f", less=True), "of_bound": Figure("fraction of the bound", ".3f")},
        conditions=[
            Condition("10", "steps of 10 ms", {"step": 0.01}),
            Condition("5", "steps of 5 ms", {"step": 0.005}),
        ],
        params={"pictures": 256, "count": 220, "workers": 4},
        quick={"pictures": 8, "count": 40, "workers": 1},
        rounds=1,
    ),
    "gpu_photos": Case(
        question="A ResNet-50 is trained on photographs from storage of 60 MB/s: how busy is the GPU with torch's "
        "loader, and with a cache and stallfree's loader?",
        setup="16 workers; photographs are decoded, cropped at random, resized to 224 and mirrored, in batches of "
        "128; autocast to bfloat16. Storage is a `ThrottledSource`. Epochs after the first, but of torch's loader on "
        "slow storage the first. Busy: the time of the same steps on one batch that stays on the GPU, over the time "
        "of the epoch.",
        contenders=[
            trained("torch", "torch, slow storage", "torch"),
            trained("warm", "torch, files in memory", "warm"),
            trained("encoded", "stallfree, encoded in the cache", "stallfree", "fetched"),
            trained("stallfree", "stallfree, decoded in the cache", "stallfree", "prepared"),
        ],
        figures={
            "rate": Figure("pictures/s"),
            "busy": Figure("busy fraction of the GPU", ".3f"),
            "first": Figure("first step of an epoch, ms", less=True),
            "first_epoch": Figure("s, first epoch", ".1f", less=True),
        },
        params={"count": 6400, "batch": 128, "workers": 16, "bandwidth": 60e6, "epochs": 3},
        quick={"count": 64, "batch": 8, "workers": 1, "epochs": 1},
        rounds=1,
        prepare=photos(1000, repeat=True),
    ),
    "gpu_prep": Case(
        question="How many photographs do CPU cores and the GPU's decoder prepare, and how busy is the GPU that "
        "trains on them?",
        setup="Photographs in memory; a random part of each is resized to 224 and mirrored half the time; batches of "
        "128; a ResNet-50, autocast to bfloat16. All processes and threads run on so many cores, one worker for each.",
        contenders=[
            decoder("torchvision", "torchvision on the GPU"),
            decoder("cpu", "stallfree, decoded on the CPU"),
            decoder("gpu", "stallfree, decoded on the GPU"),
        ],
        figures={
            "trained": Figure("pictures/s with a ResNet-50"),
            "busy": Figure("busy fraction of the GPU", ".3f"),
            "alone": Figure("pictures/s, loader alone"),
        },
        conditions=[Condition(str(cores), f"{cores} cores", {"cores": cores}) for cores in (2, 4, 8)],
        ours="gpu",
        subject="decoding on the GPU",
        params={"batch": 128},
        quick={"batch": 8},
        rounds=1,
        prepare=photos(200, repeat=True),
    ),
}
