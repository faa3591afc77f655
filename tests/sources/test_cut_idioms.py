"""Idioms of data sets that augment, by `cache="auto"` alone: cut where possible, with the batches of no cache."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import stallfree as sf
from loader_data import same
from stallfree.sources.cut import cut_any

COUNT = 24


class Base(Dataset[Any]):
    """Arrays and labels from slow storage, which notes each read in a file."""

    log = ""

    def __init__(self, transform: Any = None, other: Any = None) -> None:
        self.transform, self.target_transform = transform, other
        self.count = COUNT

    def __len__(self) -> int:
        return self.count

    def read(self, id: int) -> Any:
        time.sleep(0.002)
        with open(self.log, "ab") as log:
            log.write(b".")
        return torch.full((2, 3), float(id))


def noisy(value: Any) -> Any:
    return value + random.random() + torch.rand(()).item() + np.random.rand()


def tripled(value: Any) -> Any:
    return value * 3


def negative(label: int) -> int:
    return -label


def both(image: Any, mask: Any) -> Any:
    shift = random.random()
    return image + shift, mask - shift


def named(**parts: Any) -> Any:
    shift = random.random()
    return {name: value + shift for name, value in parts.items()}


def row(sample: Any) -> Any:
    return {"image": sample["image"] + random.random(), "label": sample["label"]}


class Guarded(Base):
    def __getitem__(self, id: int) -> Any:
        image = self.read(id)
        if self.transform:
            image = self.transform(image)
        return image, id


class Optional(Base):
    def __getitem__(self, id: int) -> Any:
        image, label = self.read(id), id
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            label = self.target_transform(label)
        return image, label


class Pair(Base):
    def __getitem__(self, id: int) -> Any:
        image, mask = self.transform(self.read(id), self.read(id) + 1)
        return image, mask


class ByName(Base):
    def __getitem__(self, id: int) -> Any:
        made = self.transform(image=self.read(id), mask=self.read(id) + 1)
        return made["image"], made["mask"], id


class Rows(Base):
    def __getitem__(self, id: int) -> Any:
        return self.transform({"image": self.read(id), "label": id})


class Dictionary(Base):
    def __getitem__(self, id: int) -> Any:
        return {"image": self.transform(self.read(id)), "id": id, "more": [id, {"twice": 2 * id}]}


class Views(Base):
    def __getitem__(self, id: int) -> Any:
        image = self.read(id)
        return [self.transform(image), self.transform(image)], id


class Some(Base):
    def __getitem__(self, id: int) -> Any:
        image = self.read(id)
        return (self.transform(image) if id % 3 else image), id


class Chain(Base):
    def __init__(self, transform: Any, normalize: Any) -> None:
        super().__init__(transform)
        self.normalize = normalize

    def __getitem__(self, id: int) -> Any:
        return self.normalize(self.transform(self.read(id))), id


class AllInOne(Base):
    """Calls a function of its own, which calls the transform."""

    def __getitem__(self, id: int) -> Any:
        return self.finished(self.read(id)), id

    def finished(self, image: Any) -> Any:
        return self.transform(image)


class OverSubset(Dataset[Any]):
    """The usual wrapper that gives a part of a data set a transform."""

    def __init__(self, subset: Any, transform: Any) -> None:
        self.subset, self.transform = subset, transform

    def __len__(self) -> int:
        return len(self.subset)

    def __getitem__(self, id: int) -> Any:
        image, label = self.subset[id]
        return self.transform(image), label


class Divided(Base):
    """Refused: the output is used."""

    def __getitem__(self, id: int) -> Any:
        return self.transform(self.read(id)) / 255, id


class Drawing(Base):
    """Refused: it draws outside of the transform."""

    def __getitem__(self, id: int) -> Any:
        return self.transform(self.read(id) + random.random()), id


def short(*datasets: Any) -> Any:
    for dataset in datasets:
        dataset.count = COUNT // len(datasets)
    return datasets


IDIOMS: dict[str, tuple[Callable[[], Any], str]] = {
    "if self.transform": (lambda: Guarded(noisy), "cut at transform"),
    "a composition": (lambda: Guarded(sf.Compose([tripled, noisy])), "cut at transform"),
    "two attributes": (lambda: Optional(noisy, negative), "cut at transform and target_transform"),
    "unpacked": (lambda: Pair(both), "cut at transform"),
    "by name": (lambda: ByName(named), "cut at transform"),
    "a dict in, a dict out": (lambda: Rows(row), "cut at transform"),
    "in a dict": (lambda: Dictionary(noisy), "cut at transform"),
    "two views": (lambda: Views(noisy), "cut at transform"),
    "some samples": (lambda: Some(noisy), "cut at transform"),
    "a chain": (lambda: Chain(noisy, tripled), "cut at transform and normalize"),
    "a helper": (lambda: AllInOne(noisy), "cut at transform"),
    "a subset": (lambda: Subset(Guarded(noisy), range(3, 21)), "cut at dataset.transform"),
    "over a subset": (lambda: OverSubset(Subset(Guarded(), range(3, 21)), noisy), "cut at transform"),
    "joined": (
        lambda: ConcatDataset(short(Guarded(noisy), Optional(tripled))),
        "cut at datasets.0.transform and datasets.1.transform",
    ),
    "arithmetic on the output": (lambda: Divided(noisy), "__truediv__ was applied to its output"),
    "draws of its own": (lambda: Drawing(noisy), "outside of the transform"),
}


@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, words = IDIOMS[name]
    log = tmp_path / "log"
    monkeypatch.setattr(Base, "log", str(log))
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 5, "num_workers": 1}
    with sf.DataLoader(make(), **options) as loader:
        plain = [list(loader) for _ in range(2)]
    with sf.DataLoader(make(), cache="auto", capacity="4MiB", **options) as loader:
        batches = [list(loader)]
        read = log.stat().st_size
        batches.append(list(loader))
        assert words in loader.decision
        assert (log.stat().st_size == read) is words.startswith("cut"), "a sample that is cut is read once"
    assert same(batches, plain)
    assert not same(batches[0], batches[1])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Guarded(), "no attribute of Guarded holds a transform"),
        (lambda: Guarded(lambda image: image + np.random.default_rng().random()), "differs each time"),
        (lambda: [torch.zeros(2)] * 9, "no attribute of list holds a transform"),
    ],
)
def test_the_reason_is_given(
    make: Callable[[], Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Base, "log", str(tmp_path / "log"))
    source, said = cut_any(make())
    assert source is None
    assert why in said


class Loaded(Base):
    def __init__(self) -> None:
        super().__init__(noisy)
        self.loader, self.calls = float, 0

    def __getitem__(self, id: int) -> Any:
        self.calls += 1
        return self.transform(torch.tensor(self.loader(id))), id


def test_readers_are_no_transforms_and_this_process_makes_no_sample() -> None:
    data = Loaded()
    assert cut_any(data)[1] == "cut at transform"
    assert data.calls == 0


class Keyworded:
    """Pictures that a composition of albumentations augments."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> Any:
        return self.transform(image=np.full((32, 32, 3), id, np.uint8))["image"], id


@pytest.mark.filterwarnings("error::stallfree.StallfreeWarning")
def test_a_composition_of_albumentations() -> None:
    """A composition has a length and items, as a data set has; a step keeps the parameters of its last call."""
    library = pytest.importorskip("albumentations")
    data = Keyworded(library.Compose([library.Resize(24, 24), library.RandomCrop(16, 16), library.HorizontalFlip()]))
    source, words = cut_any(data)
    assert source is not None, words
    with sf.CachedDataset(source, capacity="4MiB") as cached:
        for _ in range(2):
            data[0]
            for images, ids in sf.DataLoader(cached, batch_size=8):
                assert (images == ids[:, None, None, None]).all()
