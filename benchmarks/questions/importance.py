"""Does importance sampling read less, at the same accuracy?"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks import small_resnet
from benchmarks.data import FromFunction
from benchmarks.harness import ROOT, Case, Condition, Contender, Figure, Options
from benchmarks.photos import make_photos
from benchmarks.timing import find_photos

Figures = dict[str, Any]


@sf.mark_random
class Flip:
    """Mirrored half the time, as a contiguous tensor (channels, height, width)."""

    def __call__(self, pixels: Any) -> torch.Tensor:
        picture = pixels[:, ::-1] if random.random() < 0.5 else pixels
        return torch.from_numpy(np.ascontiguousarray(picture.transpose(2, 0, 1)))


class MadeUpLosses:
    """Losses such as training gives: heavy-tailed, high or low for the same samples for a long time, falling.

    A sample has a level, log-normal, a tenth less after each training step; a loss is the level times log-normal noise.
    """

    def __init__(self, samples: int) -> None:
        self.generator = np.random.default_rng(11)
        self.level = np.exp(self.generator.normal(0, 1, samples))

    def step(self, ids: Any) -> torch.Tensor:
        self.level[ids] *= 0.9
        noise = np.exp(self.generator.normal(0, 0.5, len(ids)))
        return torch.from_numpy((self.level[ids] * noise).astype(np.float32))


def epochs(
    photos: str,
    policy: str,
    plan: str,
    on_miss: str,
    fraction: float,
    requests: float,
    device: float,
    warm: int,
    timed: int,
) -> Figures:
    """Seconds of an epoch behind slow storage, with a plan and a cache of a part of the data.

    Args:
        photos: folder of the pictures.
        policy: of the cache.
        plan: of the `ImportanceSampler`; "" for all samples in random order.
        on_miss: of the `ImportanceSampler`.
        fraction: of the data that the cache holds.
        requests: of the storage per second.
        device: samples/s that are trained, by a wait.
        warm: epochs before those that are timed.
        timed: epochs that are timed.
    """
    torch.set_num_threads(1)
    folder = sf.ImageFolder(photos, Flip())
    count = len(folder)
    source = sf.testing.ThrottledSource(folder, bandwidth=100e6, latency=0.002, iops=requests)
    size = sum(path.stat().st_size for path in find_photos(photos))
    capacity = int(fraction * size * 1.04) + 24 * count
    losses = MadeUpLosses(count)
    figures: dict[str, list[float]] = {"seconds": [], "trained": [], "read": []}
    with sf.CachedDataset(source, capacity=capacity, policy=policy, form="fetched") as data:
        options: Figures = {"shuffle": True}
        if plan:
            options = {"sampler": sf.ImportanceSampler(count, plan=plan, cache=data.cache, on_miss=on_miss)}
        with sf.DataLoader(data, 25, num_workers=2, persistent_workers=True, with_ids=True, **options) as loader:
            for number in range(warm + timed):
                reads, trained, owed, begun = source.requests, 0, 0.0, time.perf_counter()
                for batch in loader:
                    owed += len(batch.ids) / device
                    stepped = time.perf_counter()
                    time.sleep(max(0.0, owed))
                    owed -= time.perf_counter() - stepped
                    trained += len(batch.ids)
                    if plan:
                        loader.update(batch.ids, losses.step(batch.ids.numpy()))
                if number >= warm:
                    figures["seconds"].append(time.perf_counter() - begun)
                    figures["trained"].append(trained / count)
                    figures["read"].append((source.requests - reads) / count)
    return figures


def thumbs(scratch: Path, options: Options) -> Figures:
    about = make_photos(scratch / "photos", options.data, 300 if options.quick else 1600, side=144, quality=96)
    return {"photos": str(scratch / "photos"), "about": about}


# -- accuracy ---------------------------------------------------------------------------------------------------------


def training(
    cifar: str,
    keep: str,
    plan: str,
    epochs: int,
    fraction: float,
    round: int,
    options: Figures | None = None,
    first: int = 0,
) -> Figures:
    """Accuracy after a training, and the storage operations that it cost.

    Args:
        cifar: folder of CIFAR-10.
        keep: file for the decoded pictures.
        plan: "full" or a plan of the `ImportanceSampler`.
        epochs: to train.
        fraction: of the samples that the cache holds.
        round: the seed.
        options: of the `ImportanceSampler`.
        first: train on so many samples only; 0 for all.
    """
    torch.set_num_threads(1)
    pictures, labels, test_pictures, test_labels = small_resnet.read_cifar(Path(cifar), Path(keep))
    if first:
        chosen = torch.linspace(0, len(labels) - 1, first).long()
        pictures, labels = pictures[chosen], labels[chosen]
    count = len(labels)
    samples, classes = pictures.numpy(), labels.tolist()
    source = FromFunction(count, lambda id: (samples[id], classes[id]))
    capacity = int(fraction * count * (pictures[0].nbytes + 64)) + 28 * count
    policy = "minio" if plan == "full" else "importance"
    with sf.CachedDataset(source, capacity=capacity, policy=policy, form="fetched", seed=round) as data:
        sampler = None
        if plan != "full":
            sampler = sf.ImportanceSampler(count, plan=plan, cache=data.cache, seed=round, **(options or {}))
        order: Figures = {"sampler": sampler} if sampler else {"shuffle": True, "seed": round}
        with sf.DataLoader(data, 128, with_ids=True, drop_last=True, **order) as loader:
            expected = sampler.expected_samples(epochs) if sampler else epochs * count
            served = [0]

            def batches() -> Iterator[Any]:
                for epoch in range(epochs):
                    loader.set_epoch(epoch)
                    for batch in loader:
                        served[0] += len(batch.ids)
                        yield torch.as_tensor(batch.data[0]), batch.data[1], batch.ids.numpy(), batch.weights

            def learn(ids: Any, losses: torch.Tensor) -> None:
                if sampler:
                    loader.update(ids, losses)

            net = small_resnet.train(batches(), expected, round, learn)
        operations = data.stats().misses / count
    accuracy = small_resnet.accuracy(net, test_pictures, test_labels)
    return {"accuracy": accuracy, "operations": operations, "served": served[0] / count}


def cifar(scratch: Path, options: Options) -> Figures:
    keep = ROOT / ".bench" / "cifar.npz"
    keep.parent.mkdir(exist_ok=True)
    return {"cifar": str(options.data or "cifar10"), "keep": str(keep)}


# -- cases ------------------------------------------------------------------------------------------------------------

HERE = "benchmarks.questions.importance"


def plan(key: str, title: str, policy: str, plan: str = "", on_miss: str = "fetch") -> Contender:
    return Contender(key, title, f"{HERE}:epochs", {"policy": policy, "plan": plan, "on_miss": on_miss})


def trained(key: str, title: str, epochs: int, only: tuple[str, ...] = (), **options: float) -> Contender:
    return Contender(
        key, title, f"{HERE}:training", {"plan": key.split()[0], "epochs": epochs, "options": options}, only=only
    )


CASES = {
    "importance_time": Case(
        question="Pictures behind storage of 800 requests/s, a cache for 20% of them, and a device that is a wait: "
        "how long is an epoch with each plan and cache?",
        setup="Decoded and mirrored by 2 workers, batches of 25. The device trains on ten times the requests/s of "
        "the storage. Losses are made up: log-normal levels that stay with a sample and fall by a tenth each time it "
        "is trained, with noise. An epoch of a plan by importance has fewer samples; whether they are enough to "
        "learn from is the question of `importance_accuracy`.",
        contenders=[
            plan("default", "all samples, LRU", "lru"),
            plan("minio", "all samples, MinIO (CoorDL)", "minio"),
            plan("ilfu", "drawn by loss, LFU", "lfu", "icache"),
            plan("icache", "stallfree, `icache`", "importance", "icache", "swap"),
            plan("unbiased", "stallfree, `unbiased`", "importance", "unbiased"),
        ],
        figures={
            "seconds": Figure("s per epoch", ".2f", less=True),
            "trained": Figure("trained / N", ".2f"),
            "read": Figure("read / N", ".3f", less=True),
        },
        ours="icache",
        subject="`icache`",
        params={"fraction": 0.2, "requests": 800, "device": 8000, "warm": 12, "timed": 5},
        quick={"warm": 2, "timed": 2},
        rounds=3,
        prepare=thumbs,
    ),
    "importance_accuracy": Case(
        question="CIFAR-10, a residual network of 78,042 weights: which accuracy is there for which number of "
        "storage operations? An operation is a sample that is read from storage; the first epoch, which fills the "
        "cache, counts too.",
        setup="On the CPU, one thread for each training; the seed of a round draws the weights, the order and the "
        "augmentation. The learning rate goes by samples served, so that every training ends its schedule. `icache` "
        "has a full epoch every third one.",
        contenders=[
            trained("full 10", "all samples, 10 epochs", 10),
            trained("full 30", "all samples, 30 epochs", 30),
            trained("icache 16", "`icache`, 16 epochs", 16, full_every=3),
            trained("icache 30", "`icache`, 30 epochs", 30, full_every=3),
            trained("unbiased 30", "`unbiased`, 30 epochs", 30, ("20",), target_io=0.13),
            trained("unbiased 88", "`unbiased`, 88 epochs", 88, ("20",), target_io=0.155),
            trained("unbiased 18", "`unbiased`, 18 epochs", 18, ("40",), target_io=0.216),
            trained("unbiased 55", "`unbiased`, 55 epochs", 55, ("40",), target_io=0.25),
        ],
        figures={
            "accuracy": Figure("top-1, %", ".2f"),
            "operations": Figure("operations / N", ".2f", less=True),
            "served": Figure("samples served / N", ".1f"),
        },
        conditions=[
            Condition("20", "cache of 20%", {"fraction": 0.2}),
            Condition("40", "cache of 40%", {"fraction": 0.4}),
        ],
        ours="",
        quick={"epochs": 3, "first": 2000},
        rounds=3,
        prepare=cifar,
        limit=7200,
    ),
}
