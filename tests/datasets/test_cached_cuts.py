"""A cached cut of a data set gives the batches of the data set itself, and reads each sample once."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import stallfree as sf
from unseen import integer, unseen_ids

COUNT = 24


def halved(image: Any) -> Any:
    return np.array(image.resize((6, 4)))


def shifted(image: Any) -> Any:
    return torch.from_numpy(image + np.random.rand()) + random.random() + torch.rand(())


def both(image: Any, label: int) -> Any:
    return shifted(halved(image)), label


class Pictures:
    """Decodes pictures from files, and notes each decoding in a file that all processes append to."""

    def __init__(self, root: Path, transform: Any) -> None:
        self.root, self.transform = root, transform

    def __len__(self) -> int:
        return COUNT

    def read(self, id: int) -> Any:
        with Image.open(self.root / f"{id}.png") as image, open(self.root / "decoded", "ab", buffering=0) as log:
            log.write(bytes([id]))
            return image.convert("RGB")

    def __getitem__(self, id: int) -> Any:
        return self.transform(self.read(id)), id


class Joint(Pictures):
    """Calls its transform with two arguments, and unpacks what it returns."""

    def __getitem__(self, id: int) -> Any:
        image, label = self.transform(self.read(id), id)
        return image, label


@pytest.fixture(name="root")
def folder(tmp_path: Path) -> Path:
    for id in range(COUNT):
        pixels = np.arange(8 * 12 * 3).reshape(8, 12, 3) * (2 * id + 1) % 251
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{id}.png")
    return tmp_path


def decoded(root: Path) -> list[int]:
    """The ids that have been decoded since the last call."""
    log = root / "decoded"
    ids = list(log.read_bytes()) if log.exists() else []
    log.unlink(missing_ok=True)
    return sorted(ids)


def epochs(data: Any, workers: int, **options: Any) -> list[list[Any]]:
    with sf.DataLoader(data, batch_size=5, shuffle=True, seed=1, num_workers=workers, **options) as loader:
        return [list(loader) for _ in range(3)]


def flat(batches: Any) -> Iterator[Any]:
    for batch in batches:
        yield from batch


def images(batches: Any) -> Iterator[tuple[int, Any]]:
    for batch in batches:
        yield from zip(batch[1].tolist(), batch[0], strict=True)


@pytest.mark.parametrize(
    ("kind", "workers", "form", "context"),
    [
        (Pictures, 0, "fetched", None),
        (Pictures, 2, "prepared", None),
        (Joint, 1, "auto", "forkserver"),
    ],
)
def test_the_batches_are_those_of_the_data_set(
    root: Path, kind: type[Pictures], workers: int, form: str, context: str | None
) -> None:
    dataset = kind(root, sf.Compose([halved, shifted]) if kind is Pictures else both)
    plain = epochs(dataset, 1)
    data = sf.cut(dataset, "transform")
    decoded(root)
    with sf.CachedDataset(data, capacity="4MiB", form=form) as cached:
        made = epochs(cached, workers, multiprocessing_context=context)
        assert decoded(root) == list(range(COUNT))  # once each, in three epochs
    for mine, theirs in zip(made, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(flat(mine), flat(theirs), strict=True))
    augmented = [dict(images(epoch)) for epoch in made]
    for id in range(COUNT):
        one, two, three = (epoch[id] for epoch in augmented)
        assert not any(torch.equal(a, b) for a, b in ((one, two), (two, three), (one, three)))


DRAWN = unseen_ids(COUNT)[0]


class Seldom(Pictures):
    """Draws random numbers itself, for one sample that neither `cut` nor the first look makes."""

    def read(self, id: int) -> Any:
        image = super().read(id)
        return image.rotate(90 * integer(4)) if id == DRAWN else image


def test_draws_outside_of_the_transform_are_found_while_the_cache_is_filled(root: Path) -> None:
    data = sf.cut(Seldom(root, sf.Compose([halved, torch.from_numpy])), "transform")
    with sf.CachedDataset(data, capacity="4MiB") as cached:
        with pytest.warns(sf.StallfreeWarning, match="random"):
            epochs(cached, 0)
        assert len({cached[DRAWN][0].numpy().tobytes() for _ in range(20)}) > 1


@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_cache_such_draws_are_fresh(root: Path, workers: int) -> None:
    data = sf.cut(Seldom(root, sf.Compose([halved, torch.from_numpy])), "transform")
    options = {"batch_size": 2, "seed": 1, "num_workers": workers, "persistent_workers": workers > 0}
    with sf.DataLoader(data, **options) as loader:
        assert len({dict(images(loader))[DRAWN].numpy().tobytes() for _ in range(8)}) > 1
