"""The same seed gives the same batches, whatever is cached, in how many workers, and however these are started."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from loader_data import pixels
from stallfree.sources.mapped import BaseSource

COUNT = 12


class Pictures(BaseSource):
    """Pictures with a pipeline of their own."""

    def __init__(self, steps: Any) -> None:
        self.pipeline = sf.Compose(steps)

    def __len__(self) -> int:
        return COUNT

    def _record(self, id: int) -> Any:
        return pixels(id).numpy()

    def _where(self, id: int) -> str:
        return f"picture {id}"

    def fingerprint(self) -> str:
        return "pictures"


class Noise:
    """Adds what its generator draws."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, picture: Any) -> Any:
        return picture + self.generator.random(picture.shape)


class LateNoise:
    """Makes its generator when it is first called."""

    generator: Any = None

    def __call__(self, picture: Any) -> Any:
        if self.generator is None:
            self.generator = np.random.default_rng()
        return picture + 0 * self.generator.random(picture.shape)


class Scale:
    """Owns a generator, and draws nothing."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def __call__(self, picture: Any) -> Any:
        return picture / 2


def drawn(picture: Any) -> Any:
    return picture + np.random.random() + torch.rand(()).item()


def albumentations() -> list[Any]:
    A = pytest.importorskip("albumentations")
    return [A.Resize(12, 12), A.RandomCrop(8, 8), A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=1)]


def users() -> list[Any]:
    return [Scale(), Noise(np.random.default_rng()), drawn, Scale(), Noise(np.random.RandomState())]


def shared() -> list[Any]:
    """Two generators in five steps, both in the deterministic part too."""
    one, other = np.random.default_rng(), np.random.default_rng()
    first, second = Scale(), Scale()
    first.generator, second.generator = other, one
    return [first, second, Noise(one), Noise(other), Noise(one)]


def late() -> list[Any]:
    return [sf.mark_deterministic(LateNoise()), Noise(np.random.default_rng())]


def monai() -> list[Any]:
    M = pytest.importorskip("monai.transforms")
    scale = functools.partial(np.true_divide, 2)
    return [M.Compose([M.ScaleIntensity(), M.RandGaussianNoise(prob=1), M.RandFlip(prob=0.5)]), np.asarray, scale]


def epochs(make: Callable[[], list[Any]], form: Any, workers: int = 0, method: str | None = None) -> list[Any]:
    """The batches of two epochs."""
    source = Pictures(make())
    data = source if form is None else sf.CachedDataset(source, capacity="4MiB", form=form)
    options = {"batch_size": 4, "shuffle": True, "seed": 1, "multiprocessing_context": method}
    with sf.DataLoader(data, num_workers=workers, persistent_workers=workers > 0, **options) as loader:
        return [batch.clone() for _ in range(2) for batch in loader]


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


FORMS = ["fetched", "prepared"]


@pytest.mark.parametrize(
    "make",
    [
        users,
        shared,
        late,
        pytest.param(albumentations, marks=pytest.mark.libraries),
        pytest.param(monai, marks=[pytest.mark.libraries, pytest.mark.slow]),
    ],
)
def test_every_form_gives_what_no_cache_gives(make: Callable[[], list[Any]]) -> None:
    plain = epochs(make, None)
    assert len({batch.numpy().tobytes() for batch in plain}) == len(plain)
    assert [form for form in FORMS if not equal(epochs(make, form), plain)] == []


@pytest.mark.parametrize(
    ("form", "method"),
    [("fetched", "fork"), ("prepared", "forkserver"), pytest.param("fetched", "spawn", marks=pytest.mark.slow)],
)
def test_any_way_to_start_workers(form: Any, method: str) -> None:
    assert equal(epochs(shared, form, 2, method), epochs(shared, None))
