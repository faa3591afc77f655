"""A loader with an `ImportanceSampler` can be copied and sent to another process, as torch's can."""

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stallfree as sf

COUNT = 40
SAMPLES = list(range(COUNT))


def plain(folder: Path, **arguments: Any) -> sf.DataLoader:
    return sf.DataLoader(SAMPLES, 4, sampler=sf.ImportanceSampler(COUNT, plan="icache", beta=3), **arguments)


def cached(folder: Path, *, num_workers: int = 0, **arguments: Any) -> sf.DataLoader:
    data = sf.CachedDataset(SAMPLES, capacity="1MiB", policy="importance", name="copies")
    sampler = sf.ImportanceSampler(COUNT, cache=data.cache, plan="icache", **arguments)
    return sf.DataLoader(data, 4, sampler=sampler, num_workers=num_workers)


MAKE: dict[str, Callable[[Path], sf.DataLoader]] = {
    "plain": plain,
    "plain, with workers": lambda folder: plain(folder, num_workers=1, persistent_workers=True),
    "cached": cached,
    "cached, with a worker": lambda folder: cached(folder, num_workers=1),
    "cached, substitutes": lambda folder: cached(folder, on_miss="substitute"),
    "packages": lambda folder: cached(folder, packages=folder),
}
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda loader: pickle.loads(pickle.dumps(loader))}


def epoch(batches: Any, loader: sf.DataLoader) -> list[int]:
    """The ids of the rest of an epoch, each with its sample and a loss."""
    ids = []
    for batch in batches:
        assert batch.data.tolist() == batch.ids.tolist()
        loader.update(batch.ids, batch.ids.float())
        ids += batch.ids.tolist()
    return ids


def close(loader: sf.DataLoader) -> None:
    loader.close()
    if isinstance(loader.dataset, sf.CachedDataset):
        loader.dataset.close()


@pytest.mark.parametrize(("copied", "taken"), [("deepcopy", 0), ("pickle", 3), ("deepcopy", 10)])
@pytest.mark.parametrize("kind", MAKE)
def test_a_copy_goes_on_by_itself(kind: str, copied: str, taken: int, tmp_path: Path) -> None:
    loader = MAKE[kind](tmp_path)
    iterator = iter(loader)
    before = [id for _ in range(taken) for id in epoch([next(iterator)], loader)]
    if taken == 10:
        assert next(iterator, None) is None
    other = COPIES[copied](loader)
    assert other.sampler is not loader.sampler
    other.set_epoch(0)
    assert sorted(epoch(other, other)) == list(range(COUNT))
    shorter = len(epoch(other, other))
    assert sorted(before + epoch(iterator, loader)) == list(range(COUNT))
    assert shorter == len(epoch(loader, loader)) <= COUNT, "the same losses give the same plan"
    close(loader)
    close(other)


def train(loader: sf.DataLoader, answers: Any) -> None:
    answers.send([len(epoch(loader, loader)) for _ in range(2)])
    close(loader)


@pytest.mark.parametrize(("kind", "used"), [("plain", False), ("packages", True)])
def test_it_can_be_sent_to_another_process(kind: str, used: bool, tmp_path: Path) -> None:
    loader = MAKE[kind](tmp_path)
    if used:
        epoch(loader, loader)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=train, args=(loader, theirs))
    process.start()
    assert ours.poll(60)
    sizes = ours.recv()
    process.join()
    assert process.exitcode == 0
    assert sizes[0] == COUNT or (used and 0 < sizes[0] < COUNT)
    assert len(epoch(loader, loader)) > 0, "this one goes on as well"
    ours.close()
    theirs.close()
    close(loader)
