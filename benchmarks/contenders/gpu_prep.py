"""Decoding and cropping on the CPU and on the GPU: one part per process, see `benchmarks/gpu.py`.

    python -m benchmarks.contenders.gpu_prep PART OUT.json PHOTOS [--quick] [--device cpu]

A part writes its JSON each time that a figure is known, so a part that is stopped leaves what it has.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

import stallfree as sf
from benchmarks.contenders.gpu_photos import SIDE, Trainer
from benchmarks.harness import machine
from stallfree.vision import native

Json = dict[str, Any]
BATCH = 128
CORES = (2, 4, 8)


class Part:
    """One part: its settings, and the file of its figures."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.out: Path = given.out
        self.quick: bool = given.quick
        self.device: str = given.device
        self.paths = sorted(given.photos.glob("*/*.jpg"))[: 64 if given.quick else None]
        self.batch = 8 if given.quick else BATCH
        self.found: Json = {"device": torch.cuda.get_device_name() if self.on_gpu else "cpu"}
        self.found |= {"torch": torch.__version__, "native": native.library() is not None, "machine": machine()}

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def seconds(self, long: float) -> float:
        """The length of a measurement."""
        return 0.3 if self.quick else long

    def save(self, **found: Any) -> None:
        """Add figures to the file."""
        self.found |= found
        self.out.write_text(json.dumps(self.found, indent=1))
        print(found, flush=True)

    def finish(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def time(self, function: Callable[[], object], long: float) -> float:
        """Seconds per call, after one that is not timed."""
        function()
        self.finish()
        begun, calls = time.perf_counter(), 0
        while time.perf_counter() < begun + self.seconds(long):
            function()
            calls += 1
        self.finish()
        return (time.perf_counter() - begun) / calls


def crop_step(*, on_device: bool) -> sf.DecodeRandomResizedCrop:
    return sf.DecodeRandomResizedCrop(SIDE, flip=0.5, on_device=on_device)


def encoded_batch(part: Part, size: int) -> Any:
    """A batch of encoded pictures."""
    files = itertools.islice(itertools.cycle(part.paths), size)
    step = crop_step(on_device=True)
    return default_collate([step(path.read_bytes()) for path in files])


# -- the decoder alone ------------------------------------------------------------------------------------------------


def decoder(part: Part) -> None:
    """Pictures per second of the decoder, and of decoding with crop and resize, for several batch sizes."""
    watch = Utilization()
    for size in (8, 16) if part.quick else (1, 16, 64, 128, 256):
        pictures = encoded_batch(part, size)
        files = [torch.from_numpy(np.fromfile(path, np.uint8)) for path in (part.paths * size)[:size]]
        whole = part.time(partial(pictures.to, part.device), 2)
        figures: Json = {"decode, crop and resize": size / whole}
        if part.on_gpu:
            from torchvision.io import decode_jpeg

            watch.mark()
            figures["decode"] = size / part.time(partial(decode_jpeg, files, device=part.device), 2)
            figures["utilization of the JPEG decoder, %"] = watch.since_mark()
            used = time.thread_time()
            for _ in range(5):
                pictures.to(part.device)
            figures["processor ms per picture"] = (time.thread_time() - used) / 5 / size * 1000
        part.save(**{f"batches of {size}": figures})
    here = crop_step(on_device=False)
    files_ = [path.read_bytes() for path in part.paths[:64]]
    seconds = part.time(lambda: [here(file) for file in files_], 2) / len(files_)
    part.save(**{"one core, decode, crop and resize": 1 / seconds})
    watch.stop()


class Utilization:
    """What nvidia-smi says of the JPEG decoder, twice a second."""

    def __init__(self) -> None:
        self._seen: list[float] = []
        command = ["nvidia-smi", "--query-gpu=utilization.jpeg", "--format=csv,noheader,nounits", "-lms", "500"]
        try:
            self._process: Any = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:
            self._process = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            try:
                self._seen.append(float(line))
            except ValueError:
                self._seen.append(float("nan"))

    def mark(self) -> None:
        self._seen.clear()

    def since_mark(self) -> float | None:
        return max(self._seen, default=None)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()


# -- pixels -----------------------------------------------------------------------------------------------------------


def pixels(part: Part) -> None:
    """Differences between both placements, and between photographs and other pictures."""
    here, there = crop_step(on_device=False), crop_step(on_device=True)
    means, worst, states = [], 0, 0
    count = 40 if part.quick else 1000
    for start in range(0, count, 50):
        samples, expected = [], []
        for number in range(start, min(start + 50, count)):
            file = part.paths[number % len(part.paths)].read_bytes()
            random.seed(number)
            expected.append(here(file))
            state = random.getstate()
            random.seed(number)
            samples.append(there(file))
            states += random.getstate() == state
        made = default_collate(samples).to(part.device).cpu().numpy()
        for mine, theirs in zip(made, expected, strict=True):
            difference = np.abs(mine.astype(np.int16) - theirs)
            means.append(float(difference.mean()))
            worst = max(worst, int(difference.max()))
    part.save(
        pictures=len(means),
        mean=statistics.mean(means),
        largest_mean_of_a_picture=max(means),
        largest_difference=worst,
        same_draws=states,
    )


# -- training ---------------------------------------------------------------------------------------------------------


def set_cores(cores: int) -> None:
    """Let all threads of this process, and those that they start, run on so many cores."""
    everything = sorted(ALL_CORES)[:cores]
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), everything)


ALL_CORES = os.sched_getaffinity(0)


class Files(torch.utils.data.Dataset[Any]):
    """The bytes of photographs as tensors, for torchvision's way."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, id: int) -> Any:
        return torch.from_numpy(np.fromfile(self.paths[id], np.uint8)), id % 1000


def as_lists(samples: list[Any]) -> Any:
    return [data for data, _ in samples], torch.tensor([label for _, label in samples])


def torchvisions(batches: Iterable[Any], device: str) -> Iterator[Any]:
    """Decode a batch by torchvision, then crop, resize and mirror picture by picture by its transforms."""
    from torchvision.io import decode_jpeg
    from torchvision.transforms import v2

    cut = v2.Compose([v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip()])
    for files, labels in batches:
        pictures = torch.stack([cut(picture) for picture in decode_jpeg(files, device=device)])
        yield pictures.permute(0, 2, 3, 1), labels.to(device)


def timed(part: Part, batches: Iterable[Any], step: Callable[[Any, Any], object], long: float) -> Json:
    """Steps and seconds of a loop that ends after `long` seconds; the first batches are not counted."""
    steps, begun, warm = 0, 0.0, 2 if part.quick else 10
    for number, (pictures, labels) in enumerate(batches):
        if number == warm:
            part.finish()
            begun, steps = time.perf_counter(), 0
        step(pictures, labels)
        steps += 1
        if number > warm and time.perf_counter() > begun + part.seconds(long):
            break
    part.finish()
    seconds = time.perf_counter() - begun
    return {"steps": steps, "seconds": seconds, "pictures/s": steps * part.batch / seconds}


def training(part: Part) -> None:
    """Pictures/s of loaders alone and with a ResNet-50, for 2, 4 and 8 cores."""
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    paths = part.paths * (4 if part.quick else 120)
    labels = [id % 1000 for id in range(len(paths))]
    trainer = Trainer(part.device)
    if not part.on_gpu:  # a small model, to see that all runs
        trainer.model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 1000))
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01)
    data = {name: sf.FileDataset(paths, labels, crop_step(on_device=name == "GPU")) for name in ("CPU", "GPU")}
    standing = [leaf.to(part.device) for leaf in default_collate([data["CPU"][id] for id in range(part.batch)])]
    for _ in range(1 if part.quick else 20):
        trainer.step(*standing)
    bare = part.time(lambda: trainer.step(*standing), 3)
    part.save(**{"a step on one batch that stays, ms": bare * 1000, "its pictures/s": part.batch / bare})
    runs = [(cores, name) for cores in CORES for name in ("CPU", "GPU")]
    runs += [(cores, "torchvision") for cores in CORES if part.on_gpu]
    for cores, name in runs[: 2 if part.quick else None]:
        set_cores(cores)
        options: Json = {"num_workers": cores, "persistent_workers": True, "shuffle": True, "drop_last": True}
        if name == "torchvision":
            theirs: Any = torch.utils.data.DataLoader(
                Files(paths), part.batch, collate_fn=as_lists, prefetch_factor=4, **options
            )
            ways: Callable[[], Iterable[Any]] = partial(torchvisions, theirs, part.device)
        else:
            theirs = sf.DataLoader(data[name], part.batch, device=part.device, **options)
            ways = partial(iter, theirs)
        alone = timed(part, ways(), lambda *_: None, 4)
        both = timed(part, ways(), trainer.step, 6)
        both["busy"] = bare * both["steps"] / both["seconds"]
        part.save(**{f"{cores} cores, {name}": {"loader alone": alone, "with a ResNet-50": both}})
        if name != "torchvision":
            theirs.close()
        del theirs, ways
    set_cores(len(ALL_CORES))


# -- copies -----------------------------------------------------------------------------------------------------------


def copies(part: Part) -> None:
    """Seconds per step of 5 and 10 ms with batches of 38 MB, over the longer of copy and step."""
    from benchmarks.contenders import device_gpu

    size, count = 256 * 3 * SIDE * SIDE, 60 if part.quick else 220
    ways = ("`DevicePrefetcher`", "torch, pinned")
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    copy = device_gpu.copy_seconds(source)
    part.save(**{"copy, ms": copy * 1000})
    threads = torch.get_num_threads()
    with device_gpu.own_loader({"size": size, "count": count, "workers": 4}) as own:
        for milliseconds in (5, 10):
            cycles = device_gpu.cycles_of(milliseconds / 1000)
            bare = device_gpu.step_seconds([None] * count, cycles, 20)
            figures: dict[str, list[float]] = {}
            for _ in range(1 if part.quick else 3):
                for name in ("`sf.DataLoader`", *ways):
                    torch.set_num_threads(threads)
                    batches = own if name == "`sf.DataLoader`" else device_gpu.WAYS[name](size, count, 4)
                    seconds = device_gpu.step_seconds(batches, cycles, 20)
                    figures.setdefault(name, []).append(max(copy, bare) / seconds)
                    part.save(**{f"steps of {milliseconds} ms": figures})


# -- which place is faster --------------------------------------------------------------------------------------------


def placement(part: Part) -> None:
    """What `analyze` measures of both placements, and what `predict` says, for 2 and for 8 workers."""
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    trainer = Trainer(part.device)
    paths = part.paths * 4
    data = sf.FileDataset(paths, [id % 1000 for id in range(len(paths))], crop_step(on_device=False))

    def step(batch: Any) -> None:
        trainer.step(*(leaf.to(part.device, non_blocking=True) for leaf in batch))

    for workers in (2, 8):
        set_cores(workers)
        options: Json = {"device": part.device, "seconds": part.seconds(1.5), "progress": False}
        report = sf.analyze(data, step, batch_size=part.batch, num_workers=workers, **options)
        rates = {name: each["value"] for name, each in report.data["rates"].items()}
        answers = [line for line in report.predict().answers if line.startswith("prep on")]
        advice = [item["do"] for item in report.data["advice"]][:4]
        part.save(
            **{
                f"{workers} workers": {
                    "placement": report.data["placement"],
                    "rates": rates,
                    "predict": answers,
                    "advice": advice,
                }
            }
        )
    set_cores(len(ALL_CORES))


PARTS = {function.__name__: function for function in (decoder, pixels, training, placement, copies)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("out", type=Path)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    begun = time.monotonic()
    part = Part(given)
    PARTS[given.part](part)
    part.save(took=time.monotonic() - begun)


if __name__ == "__main__":
    main()
