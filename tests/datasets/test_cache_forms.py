"""The same seed gives the same batches, whatever is cached, in how many workers, and however these are started."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from cached_data import Given
from loader_data import pixels, same

COUNT = 12


class Noise:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, picture: Any) -> Any:
        return picture + self.generator.random(picture.shape)


class LateNoise:
    generator: Any = None

    def __call__(self, picture: Any) -> Any:
        self.generator = self.generator or np.random.default_rng()
        return picture + 0 * self.generator.random(picture.shape)


class Scale(Noise):
    """Owns a generator, and draws nothing."""

    def __call__(self, picture: Any) -> Any:
        return picture / 2


def drawn(picture: Any) -> Any:
    return picture + np.random.random() + torch.rand(()).item()


def albumentations() -> list[Any]:
    A = pytest.importorskip("albumentations")
    return [A.Resize(12, 12), A.RandomCrop(8, 8), A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=1)]


def users() -> list[Any]:
    one, other = np.random.default_rng(), np.random.default_rng()
    return [Scale(one), Noise(np.random.default_rng()), drawn, Scale(other), Noise(np.random.RandomState())]


def shared() -> list[Any]:
    """Two generators in five steps, both in the deterministic part too."""
    one, other = np.random.default_rng(), np.random.default_rng()
    return [Scale(other), Scale(one), Noise(one), Noise(other), Noise(one)]


def late() -> list[Any]:
    return [sf.mark_deterministic(LateNoise()), Noise(np.random.default_rng())]


def epochs(make: Callable[[], list[Any]], form: Any, workers: int = 0, method: str | None = None) -> list[Any]:
    data: Any = Given([pixels(id).numpy() for id in range(COUNT)], make())
    data = data if form is None else sf.CachedDataset(data, capacity="4MiB", form=form)
    options = {"batch_size": 4, "shuffle": True, "seed": 1, "multiprocessing_context": method}
    with sf.DataLoader(data, num_workers=workers, persistent_workers=workers > 0, **options) as loader:
        return [batch.clone() for _ in range(2) for batch in loader]


@pytest.mark.parametrize("make", [users, shared, late, pytest.param(albumentations, marks=pytest.mark.libraries)])
def test_every_form_gives_what_no_cache_gives(make: Callable[[], list[Any]]) -> None:
    plain = epochs(make, None)
    assert len({batch.numpy().tobytes() for batch in plain}) == len(plain)
    assert [form for form in ("fetched", "prepared") if not same(epochs(make, form), plain)] == []


@pytest.mark.parametrize(("form", "method"), [
    ("fetched", "fork"), *(pytest.param("prepared", way, marks=pytest.mark.slow) for way in ("forkserver", "spawn")),
])  # fmt: skip
def test_any_way_to_start_workers(form: Any, method: str) -> None:
    assert same(epochs(shared, form, 2, method), epochs(shared, None))
