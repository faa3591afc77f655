"""The seed follows torch's generator, is the same in all processes of an iteration, and is in the state."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import stallfree as sf
from cached_data import Numbers, with_draws
from loader_data import Made, jittered, picture

COUNT = 20


def own(dataset: Any = None, **arguments: Any) -> sf.DataLoader:
    return sf.DataLoader(Made(COUNT, jittered) if dataset is None else dataset, 4, **{"shuffle": True, **arguments})


def noisier(sample: Any) -> Any:
    image, label = sample
    return image + torch.rand(image.shape), label


def epoch_of(loader: Any) -> tuple[list[int], dict[int, bytes]]:
    """The order of an epoch, and what each sample was."""
    pairs = [pair for images, labels in loader for pair in zip(labels.tolist(), images, strict=True)]
    return [label for label, _ in pairs], {label: image.numpy().tobytes() for label, image in pairs}


def all_differ(epochs: list[tuple[list[int], dict[int, bytes]]]) -> bool:
    """Whether the order differs from epoch to epoch, and each sample does."""
    numbers = [len({tuple(order) for order, _ in epochs})]
    numbers += [len({samples[id] for _, samples in epochs}) for id in epochs[0][0]]
    return set(numbers) == {len(epochs)}


@pytest.mark.parametrize(("workers", "seeds"), [(0, range(3)), (2, range(2))])
def test_torchs_seed_decides(workers: int, seeds: range) -> None:
    """Without workers, Python's and NumPy's generators draw too, as under torch's loader."""

    def run(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        if not workers:
            random.seed(seed), np.random.seed(seed)
        with own(num_workers=workers) as loader:
            return [epoch_of(loader) for _ in range(2)]

    runs = [run(seed) for seed in seeds]
    assert all_differ([epoch for epochs in runs for epoch in epochs])
    assert [run(seed) for seed in seeds] == runs


def with_sampler(sampler: Any, before: Callable[[], object] = lambda: None) -> Callable[[], Any]:
    return lambda: (before(), own(sampler=sampler, seed=5, shuffle=None))[1]


def distributed(*, told: bool) -> Callable[[], Any]:
    sampler, epochs = DistributedSampler(range(COUNT), num_replicas=1, rank=0), iter(range(9))  # type: ignore[arg-type, var-annotated]
    return with_sampler(sampler, (lambda: sampler.set_epoch(next(epochs))) if told else lambda: None)


def over(kind: Any, **options: Any) -> Callable[[], Any]:
    data = kind(Made(COUNT, picture), transform=noisier, **options)
    return lambda: own(data)


KINDS: dict[str, Callable[[], Callable[[], Any]]] = {
    "loader": lambda: own, "generator": lambda: partial(own, generator=torch.Generator().manual_seed(1)),
    "distributed": lambda: distributed(told=False), "distributed, set": lambda: distributed(told=True),
    "importance": lambda: with_sampler(sf.ImportanceSampler(COUNT, plan="full", seed=2)),
    "smart": lambda: over(sf.SmartCacheDataset, cache_num=COUNT, replace_rate=0.1, seed=5),
    "cached": lambda: over(sf.CachedDataset, capacity="4MiB"),
    "cached, seed": lambda: over(sf.CachedDataset, capacity="4MiB", seed=5),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_loader_per_epoch_repeats_nothing(kind: str) -> None:
    make, epochs = KINDS[kind](), []
    for _ in range(3):
        with make() as loader:
            epochs.append(epoch_of((batch.data if isinstance(batch, sf.Batch) else batch) for batch in loader))
    assert all_differ(epochs)
    if hasattr(loader.dataset, "close"):
        loader.dataset.close()


def test_a_model_draws_what_it_draws_with_torchs_loader_though_a_seed_is_given() -> None:
    """Loops that draw numbers of their own, such as dropout. Without a seed, `test_against_torch` compares them."""

    def run(kind: Any, **seed: Any) -> list[float]:
        torch.manual_seed(11)
        loader, drawn = kind(Made(COUNT, picture), batch_size=4, shuffle=True, **seed), [torch.rand(()).item()]
        for _ in range(3):
            drawn += [torch.rand(()).item() for _ in loader]
        return drawn

    assert run(sf.DataLoader, seed=3) == run(DataLoader)


def test_making_things_draws_nothing() -> None:
    before = torch.get_rng_state()
    data = Made(COUNT, picture)
    loader = own(data)
    sf.ImportanceSampler(COUNT)
    with sf.CachedDataset(data, capacity="1MiB"), sf.SmartCacheDataset(data, noisier, cache_num=5):
        loader.state_dict()
        len(loader)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_state_replaces_the_seed_that_persistent_workers_have() -> None:
    with own(num_workers=1, persistent_workers=True) as one, own(num_workers=1) as other:
        list(one), list(other)
        one.load_state_dict(other.state_dict())
        assert epoch_of(one) == epoch_of(other)


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(way, marks=pytest.mark.slow) for way in ("forkserver", "spawn"))]
)
def test_a_cached_data_set_follows_torchs_loader(method: str) -> None:
    """All workers of an iteration have one seed, which is torch's."""

    def run(seed: int, workers: int) -> list[dict[int, Any]]:
        torch.manual_seed(seed)
        with sf.CachedDataset(Numbers(12, [with_draws]), capacity="1MiB") as data:
            options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": method if workers else None}
            return [draws(DataLoader(data, 2, shuffle=True, **options)) for _ in range(2)]

    first = run(1, 2)
    assert run(1, 2) == run(1, 1) == first
    here = run(1, 0)
    assert run(1, 0) == here
    for runs in ([*first, *run(2, 2)], [*here, *run(2, 0)]):
        assert len({drawn for epoch in runs for drawn in epoch.values()}) == 12 * len(runs)


def draws(loader: Any) -> dict[int, Any]:
    found = {}
    for _, labels, *drawn in loader:
        found |= dict(zip(labels.tolist(), zip(*(each.tolist() for each in drawn), strict=True), strict=True))
    return found
