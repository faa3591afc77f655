"""Is it ever slower than torch's loader?"""

from __future__ import annotations

import gc
import io
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence

import stallfree as sf
from benchmarks.data import FromFunction
from benchmarks.harness import Case, Condition, Contender, Figure
from benchmarks.photos import photos
from benchmarks.timing import find_photos

Figures = dict[str, Any]
BATCH = 64
LOADERS: dict[str, Any] = {"torch": torch.utils.data.DataLoader, "stallfree": sf.DataLoader}
SHAPES = {
    "tuples": ("tuples of a tiny tensor and a number", 4000),
    "dicts": ("dicts of 10 tiny tensors", 2000),
    "lengths": ("sequences of 5 to 200 tokens, padded by `collate_fn`", 4000),
    "strings": ("strings", 4000),
    "floats": ("3x224x224 floats", 600),
    "large": ("arrays of 256 KB", 1200),
    "photographs": ("JPEG files", 4000),
}
"""Kinds of samples: what they are, and how many an epoch has."""


def make_samples(shape: str) -> FromFunction:
    """Return the samples of one kind, made in memory; photographs are decoded from JPEG bytes."""
    generator, count = np.random.default_rng(0), SHAPES[shape][1]
    tiny = torch.from_numpy(generator.random((count, 10, 4), np.float32))
    floats = torch.from_numpy(generator.random((8, 3, 224, 224), np.float32))
    large = generator.integers(0, 255, (8, 256 << 10), np.uint8)
    lengths = generator.integers(5, 200, count)
    words = torch.from_numpy(generator.integers(0, 30_000, (200,)))
    encoded = io.BytesIO()
    Image.fromarray(generator.integers(0, 255, (60, 80, 3), np.uint8)).resize((640, 480)).save(
        encoded, "JPEG", quality=90
    )

    def photograph(id: int) -> Any:
        left, top = random.randrange(200), random.randrange(100)
        picture = Image.open(io.BytesIO(encoded.getvalue())).convert("RGB").crop((left, top, left + 400, top + 300))
        return torch.from_numpy(np.array(picture.resize((224, 224)))), id

    make: dict[str, Callable[[int], Any]] = {
        "tuples": lambda id: (tiny[id, 0], id),
        "dicts": lambda id: {f"field_{number}": tiny[id, number] for number in range(10)},
        "lengths": lambda id: (words[: lengths[id]], id),
        "strings": lambda id: f"sample number {id}",
        "floats": lambda id: (floats[id % 8], id),
        "large": lambda id: (large[id % 8], id),
        "photographs": photograph,
    }
    return FromFunction(count, make[shape])


def pad(samples: list[Any]) -> Any:
    """The usual `collate_fn` for sequences."""
    return pad_sequence([tokens for tokens, _ in samples], batch_first=True), torch.tensor([id for _, id in samples])


def plain_epochs(loader: str, shape: str, workers: int, epochs: int) -> Figures:
    """Milliseconds of an epoch, and to its first batch, with workers that are kept."""
    torch.set_num_threads(1)
    data = make_samples(shape)
    options: Figures = {"batch_size": BATCH, "shuffle": True, "num_workers": workers, "persistent_workers": workers > 0}
    made = LOADERS[loader](data, collate_fn=pad if shape == "lengths" else None, **options)
    figures: dict[str, list[float]] = {"epoch": [], "first": []}
    for number in range(epochs + 1):
        begun, first, batches = time.perf_counter(), 0.0, 0
        for _batch in made:
            first = first or time.perf_counter() - begun
            batches += 1
        assert batches == -(-len(data) // BATCH)
        if number:  # the first epoch starts the workers
            figures["epoch"].append(1000 * (time.perf_counter() - begun))
            figures["first"].append(1000 * first)
    return figures


def first_batch(loader: str, shape: str, workers: int) -> Figures:
    """Milliseconds from `DataLoader(...)` to the first batch, in this process."""
    torch.set_num_threads(1)
    data = make_samples(shape)
    begun = time.perf_counter()
    batches = iter(LOADERS[loader](data, batch_size=BATCH, shuffle=True, num_workers=workers))
    pictures, ids = next(batches)
    figures = {"first": 1000 * (time.perf_counter() - begun)}
    assert len(ids) == len(pictures) == BATCH
    return figures


# -- looks while a cache is filled ------------------------------------------------------------------------------------

SKIPPED = 2
"""Batches whose samples are all made twice."""


def decode(data: bytes) -> Any:
    return Image.open(io.BytesIO(data)).convert("RGB")


def resize(image: Any) -> Any:
    return image.resize((224, 224), Image.Resampling.BILINEAR)


def to_array(image: Any) -> npt.NDArray[np.uint8]:
    return np.asarray(image).transpose(2, 0, 1)


def scale(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return pixels.astype(np.float32) / np.float32(255)


def prepare(data: bytes) -> npt.NDArray[np.float32]:
    return scale(to_array(resize(decode(data))))


def first_epochs(photos: str, steps: list[str], marked: bool, workers: int, seconds: float) -> Figures:
    """Seconds of epochs that begin with an empty cache, after the first batches.

    Steps that are marked as deterministic are not looked at while the cache is filled.
    """
    torch.set_num_threads(1)
    functions: list[Any] = [globals()[step] for step in steps]
    if marked:
        functions = [sf.mark_deterministic(step) for step in functions]
    paths = find_photos(photos)
    source = sf.FileDataset(paths, list(range(len(paths))), sf.Compose(functions))
    taken: list[float] = []
    end = time.perf_counter() + seconds
    for number in itertools.count():
        with sf.CachedDataset(
            source, capacity=5 * 224 * 224 * 3 * (len(paths) + BATCH), form="prepared", name=f"looks-{number}"
        ) as cached:
            loader = sf.DataLoader(
                cached, BATCH, num_workers=workers, multiprocessing_context="fork" if workers else None
            )
            gc.collect()
            batches = iter(loader)
            samples = sum(len(next(batches)[1]) for _ in range(SKIPPED))
            begun = time.perf_counter()
            samples += sum(len(labels) for _, labels in batches)
            taken.append(time.perf_counter() - begun)
            if samples != len(paths) or cached.stats().resident_items != len(paths):
                raise AssertionError(f"{samples} samples of {len(paths)}: {cached.stats()}")
            loader.close()
        if number >= 3 and time.perf_counter() > end:
            return {"seconds": taken[1:]}  # the first one imports, and reads the files
    raise AssertionError


# -- cases ------------------------------------------------------------------------------------------------------------

HERE = "benchmarks.questions.loader"


def kinds(names: tuple[str, ...]) -> list[Condition]:
    return [
        Condition(
            f"{name} {workers}",
            f"{SHAPES[name][0]}, {workers} worker{'s' * (workers != 1)}",
            {"shape": name, "workers": workers},
        )
        for name in names
        for workers in (0, 1, 2)
    ]


def both(function: str) -> list[Contender]:
    return [Contender(name, name, f"{HERE}:{function}", {"loader": name}) for name in LOADERS]


CASES = {
    "plain_loader": Case(
        question="Only the loader is replaced, nothing is cached, and the samples are in memory: is any data set "
        "served slower than by torch's `DataLoader`?",
        setup="Batches of 64, shuffled, workers kept from epoch to epoch, torch's operations on one thread. The "
        "median epoch of a process counts; its first one does not.",
        contenders=both("plain_epochs"),
        figures={
            "epoch": Figure("ms an epoch", ",.1f", less=True),
            "first": Figure("ms to its first batch", ",.2f", less=True),
        },
        conditions=kinds(("tuples", "dicts", "lengths", "strings", "floats", "large")),
        params={"epochs": 11},
        quick={"epochs": 2},
        rounds=5,
    ),
    "first_batch": Case(
        question="In a fresh process, how long does it take from `DataLoader(...)` to its first batch, against "
        "torch's?",
        setup="From before the call of `DataLoader(...)`, after the imports, to the first batch of 64, with the "
        "start of the workers. No cache; shuffled. JPEG files of 640x480 are decoded by Pillow, cropped at random "
        "and resized to 224x224.",
        contenders=both("first_batch"),
        figures={"first": Figure("ms", ",.1f", less=True)},
        conditions=kinds(("tuples", "floats", "photographs")),
    ),
    "watch_cost": Case(
        question="While a cache is filled, one sample in 32 is made twice, and the states of the global generators "
        "are compared per batch. How much longer does that make the first epoch, after the first 64 samples, which "
        "are all made twice?",
        setup="Photographs in memory, decoded with Pillow, resized to 224x224 and scaled, by one step or by four, "
        "cached prepared in batches of 64. Steps that are marked as deterministic are not made twice.",
        contenders=[
            Contender("marked", "without the looks", f"{HERE}:first_epochs", {"marked": True}),
            Contender("looks", "with the looks", f"{HERE}:first_epochs", {"marked": False}),
        ],
        figures={"seconds": Figure("s, first epoch", ".2f", less=True)},
        conditions=[
            Condition(f"{len(steps)} {workers}", f"{words}, {workers} workers", {"steps": steps, "workers": workers})
            for words, steps in (("one step", ["prepare"]), ("four steps", ["decode", "resize", "to_array", "scale"]))
            for workers in (0, 2)
        ],
        ours="looks",
        subject="the epoch with the looks",
        prepare=photos(640, repeat=True),
    ),
}
