"""How fast do prepared samples come out of memory?"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks.data import Pairs
from benchmarks.harness import Case, Condition, Contender, Figure, Options
from benchmarks.timing import load_noise_pictures, make_noise_pictures, prepared_rates

Figures = dict[str, Any]


class BatchedPairs(Pairs):
    """The same, a whole batch at a time: one gather instead of one tensor per sample."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(indices)
        return self.pictures[chosen], chosen


def unchanged(batch: Any) -> Any:
    return batch


def loader_options(batch: int, workers: int) -> Figures:
    options = {"batch_size": batch, "shuffle": True, "num_workers": workers, "drop_last": True}
    return options | ({"persistent_workers": True} if workers else {})


def torch_loader(folder: str, side: int, batch: int, workers: int, seconds: float, batched: bool = False) -> Figures:
    data = BatchedPairs(folder, side) if batched else Pairs(folder, side)
    collate = unchanged if batched else None
    loader: Any = torch.utils.data.DataLoader(data, collate_fn=collate, **loader_options(batch, workers))
    return {"rate": prepared_rates(lambda: loader, load_noise_pictures(folder, side), batch, seconds)}


def stallfree_loader(folder: str, side: int, batch: int, workers: int, seconds: float) -> Figures:
    pairs = Pairs(folder, side)
    options = loader_options(batch, workers)
    with sf.CachedDataset(pairs, capacity=pairs.capacity) as data, sf.DataLoader(data, **options) as loader:
        for _batch in loader:  # fills the cache
            pass
        if data.stats().resident_items != len(pairs):
            raise AssertionError(f"{data.stats().resident_items} of {len(pairs)} samples are in the cache")
        return {"rate": prepared_rates(lambda: loader, load_noise_pictures(folder, side), batch, seconds)}


def bare_copy(folder: str, side: int, batch: int, seconds: float) -> Figures:
    """One process that gathers each batch into a standing buffer, and nothing else."""
    pictures = load_noise_pictures(folder, side)
    arena = np.ascontiguousarray(pictures).reshape(len(pictures), -1)
    standing = np.zeros((batch, arena.shape[1]), np.uint8)
    epochs = itertools.count()

    def epoch() -> Iterator[Any]:
        order = np.random.default_rng(next(epochs)).permutation(len(pictures))
        for start in range(0, len(pictures), batch):
            ids = order[start : start + batch]
            np.take(arena, ids, axis=0, out=standing, mode="clip")
            yield standing, ids

    return {"rate": prepared_rates(epoch, pictures, batch, seconds)}


# -- get_many ---------------------------------------------------------------------------------------------------------

IDS, MANY = 50_000, 256
RECORDS: dict[str, Callable[[int], Any]] = {
    "pair": lambda id: (torch.full((32, 32, 3), id % 256, dtype=torch.uint8), id),
    "array": lambda id: np.full(1024, id % 256, np.uint8),
    "bytes": lambda id: bytes([id % 256]) * int(512 + id * 977 % 1024),
}


def get_many(record: str, seconds: float) -> Figures:
    """`get_many` of a cache that holds all records, in turns with a copy of as many bytes."""
    torch.set_num_threads(1)
    make, generator = RECORDS[record], np.random.default_rng(0)
    memory = np.zeros((IDS, {"pair": 3080, "array": 1024, "bytes": 1000}[record]), np.uint8)
    with sf.cache.SampleCache(IDS, capacity="512MiB", fingerprint=record, example=make(0)) as cache:
        for start in range(0, IDS, 1000):
            cache.put_many(range(start, start + 1000), [make(id) for id in range(start, start + 1000)])
        for id in generator.integers(0, IDS, 20).tolist():
            if repr(cache.get_many([id])[0]) != repr(make(id)):
                raise AssertionError(f"record {id} is a different one")
        reads, copies = [], []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(reads) < 20:
            ids = generator.integers(0, IDS, MANY)
            begun = time.perf_counter()
            cache.get_many(ids)
            read = time.perf_counter()
            np.take(memory, ids, axis=0)
            reads.append(read - begun)
            copies.append(time.perf_counter() - read)
    skip = len(reads) // 10
    total, copy = (statistics.median(times[skip:]) * 1e6 / MANY for times in (reads, copies))
    return {"beyond": total - copy, "total": total, "copy": copy}


# -- cases ------------------------------------------------------------------------------------------------------------


def pictures(side: int, samples: int) -> Callable[[Path, Options], Figures]:
    """Return the `prepare` of a case that makes noise pictures."""
    return lambda scratch, options: {
        "about": make_noise_pictures(scratch, side, samples // (8 if options.quick else 1))
    }


def prepared_case(side: int, batch: int) -> Case:
    here = "benchmarks.questions.prepared"
    return Case(
        question=f"How fast do prepared {side}x{side}x3 samples come out of memory, in batches of {batch}?",
        setup="Another random order in each epoch, 2 workers or threads. Whole epochs are timed. The first epoch of "
        "each contender is checked: every sample once, with its label and its pixels.",
        contenders=[
            Contender("torch", "torch DataLoader", f"{here}:torch_loader"),
            Contender(
                "batched", "torch DataLoader, data set that gathers batches", f"{here}:torch_loader", {"batched": True}
            ),
            Contender("stallfree", "stallfree DataLoader", f"{here}:stallfree_loader"),
            Contender("limit", "a bare gather into a standing buffer", f"{here}:bare_copy"),
            Contender("ffcv", "FFCV", "benchmarks.peers.ffcv:prepared", venv="ffcv", tunes=True),
            Contender("tfdata", "tf.data", "benchmarks.peers.tfdata:prepared", venv="tfdata", tunes=True),
        ],
        figures={"rate": Figure("samples/s")},
        params={"side": side, "batch": batch, "workers": 2},
        prepare=pictures(side, 200 * batch),
    )


CASES = {
    "prepared_224": prepared_case(224, 64),
    "prepared_32": prepared_case(32, 256),
    "get_many": Case(
        question=f"{MANY} small records in one call of `get_many`: what does a record cost beyond the copy of its "
        "bytes?",
        setup=f"{IDS:,} records in the cache, {MANY} random ids per call. The copy is `numpy.take` of as many bytes "
        "at random positions into fresh memory. Records of one structure are read by one gather, others one after "
        "the other.",
        contenders=[Contender("stallfree", "stallfree", "benchmarks.questions.prepared:get_many")],
        figures={
            "beyond": Figure("µs/record beyond the copy", ".3f", less=True),
            "total": Figure("get_many, µs/record", ".3f", less=True),
            "copy": Figure("copy, µs/record", ".3f", less=True),
        },
        conditions=[
            Condition("pair", "3 KB: picture (32x32x3) and label", {"record": "pair"}),
            Condition("array", "1 KB: array", {"record": "array"}),
            Condition("bytes", "0.5 to 1.5 KB: bytes", {"record": "bytes"}),
        ],
    ),
}
