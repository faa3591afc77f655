"""`cache="auto"` of an iterable data set: later epochs are shuffled and do not read it, or all do, as under torch."""

from __future__ import annotations

import os
import random
import re
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import IterableDataset, get_worker_info

import stallfree as sf
from stallfree import StallfreeWarning
from stallfree.errors import WorkerError
from stream_data import Killed, Listed, Parts, Range, Sized, divide

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNT = 23


def loader_of(dataset: Any, **arguments: Any) -> sf.DataLoader:
    return sf.DataLoader(dataset, **{"cache": "auto", "capacity": "4MiB", "batch_size": 4, **arguments})


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.flatten().tolist()]


@pytest.fixture
def listed(tmp_path: Path) -> Listed:
    return Listed(COUNT, str(tmp_path / "begun"))


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_later_epochs_are_shuffled_and_read_nothing(workers: int, listed: Listed) -> None:
    arguments = {"num_workers": workers, "drop_last": workers == 2}
    torchs = numbers(torch.utils.data.DataLoader(listed, 4, **arguments))
    with loader_of(listed, seed=5, **arguments) as loader:
        assert numbers(loader) == torchs
        reads = listed.begun()
        epochs = [numbers(loader) for _ in range(3)]
        assert listed.begun() == reads
        assert len(loader) == (5 if arguments["drop_last"] else 6)
        assert f"the stream Listed is cached ({COUNT} samples" in loader.decision
    kept = 20 if arguments["drop_last"] else COUNT
    for numbers_of_epoch in epochs:
        assert len(numbers_of_epoch) == len(set(numbers_of_epoch) & set(range(COUNT))) == kept
    assert len({tuple(epoch) for epoch in [torchs, *epochs]}) == 4


def test_streams_of_different_length() -> None:
    lengths = [5, 0, 9]
    whole = sorted((worker, position) for worker in range(3) for position in range(lengths[worker]))
    with loader_of(Parts(lengths), num_workers=3) as loader:
        for _ in range(3):
            assert sorted(tuple(at) for batch in loader for at in batch.tolist()) == whole
        assert "cached (14 samples" in loader.decision


def test_the_order_depends_on_seed_and_epoch(listed: Listed) -> None:
    found = []
    for seed in (1, 1, 2):
        with loader_of(listed, seed=seed) as loader:
            found.append([numbers(loader) for _ in range(3)])
            loader.set_epoch(1)
            assert numbers(loader) == found[-1][1]
    assert found[0] == found[1]
    assert found[0][1] != found[2][1]


def test_an_id_is_the_same_sample_in_each_epoch(listed: Listed) -> None:
    with loader_of(listed, num_workers=2, with_ids=True) as loader:
        epochs = [
            {
                id: number
                for batch in loader
                for id, number in zip(batch.ids.tolist(), numbers([batch.data]), strict=True)
            }
            for _ in range(3)
        ]
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(epochs[0]) == COUNT


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iteration_that_ended_early_is_not_used(persistent: bool, listed: Listed) -> None:
    with loader_of(listed, num_workers=2, persistent_workers=persistent) as loader:
        for most in (1, 3, 2):
            assert len(list(islice(loader, most))) == most
        assert loader.decision == ""
        assert sorted(numbers(loader)) == list(range(COUNT))
        reads = listed.begun()
        for _ in range(2):
            assert sorted(numbers(loader)) == list(range(COUNT))
        assert listed.begun() == reads


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_two_iterations_at_once(method: str, listed: Listed) -> None:
    for workers in (0, 1):
        with loader_of(listed, num_workers=workers, multiprocessing_context=method) as loader:
            for a, b in zip(loader, loader, strict=True):
                assert torch.equal(a, b)
            assert sorted(numbers(loader)) == list(range(COUNT))


@pytest.mark.parametrize("arguments", [{"batch_size": None}, {"collate_fn": torch.stack}, {"device": "cpu"}])
def test_forms_of_batches(arguments: Any, listed: Listed) -> None:
    for workers in (0, 1):
        with loader_of(listed, num_workers=workers, **arguments) as loader:
            assert [sorted(numbers(loader)) for _ in range(3)] == [list(range(COUNT))] * 3
            assert "is cached" in loader.decision


def test_workers_of_a_fork_server() -> None:
    arguments = {"num_workers": 2, "multiprocessing_context": "forkserver", "worker_init_fn": divide}
    with loader_of(Range(0, COUNT), **arguments) as loader:
        assert [sorted(numbers(loader)) for _ in range(2)] == [list(range(COUNT))] * 2
        assert "is cached" in loader.decision


def test_a_loader_that_was_closed_reads_again(listed: Listed) -> None:
    loader = loader_of(listed)
    for _ in range(2):
        assert numbers(loader) == list(range(COUNT))
        assert numbers(loader) != list(range(COUNT))
        loader.close()


def test_shards_of_webdataset_are_not_needed_after_the_first_epoch(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.ShardWriter(f"{tmp_path}/s-%03d.tar", maxcount=5, verbose=0) as writer:
        for number in range(COUNT):
            writer.write({"__key__": f"{number:06}", "npy": np.full((2, 2), number, np.uint8), "cls": number})
    shards = sorted(map(str, tmp_path.glob("*.tar")))
    dataset = webdataset.WebDataset(shards, shardshuffle=False).decode().to_tuple("npy", "cls")
    with loader_of(dataset, num_workers=2) as loader:
        for epoch in range(3):
            labels = []
            for pictures, some in loader:
                assert torch.equal(pictures, some[:, None, None].expand(-1, 2, 2).to(torch.uint8))
                labels += some.tolist()
            assert sorted(labels) == list(range(COUNT))
            if epoch == 0:
                for shard in shards:
                    os.remove(shard)
                labels_of_first = labels
        assert labels != labels_of_first


def test_an_auto_cache_that_was_closed() -> None:
    loader = loader_of([torch.full((1000,), float(number)) for number in range(COUNT)])
    for _ in range(2):
        assert [batch[0, 0].item() for batch in loader] == list(range(0, COUNT, 4))
        loader.close()


# -- streams that are not cached --------------------------------------------------------------------------------------


class Late(IterableDataset[float]):
    """Draws at one sample, which the first look does not see."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        for number in range(8):
            yield float(number) + (self.draw() if number == 6 and (info is None or info.id == 1) else 0.0)


class Owned(IterableDataset[float]):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __iter__(self) -> Iterator[float]:
        return (self.rng.random() if number == 6 else 0.0 for number in range(8))


class Shuffled(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8).tolist())


class ByEpoch(IterableDataset[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 * self.epoch, 10 * self.epoch + 8))


class Once(IterableDataset[int]):
    def __init__(self) -> None:
        self.left = iter(range(8))

    def __iter__(self) -> Iterator[int]:
        return self.left


class Broken(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(7)
        raise FileNotFoundError("no such shard")


class Large(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.zeros(300_000, dtype=torch.uint8) for _ in range(20))


REFUSED: dict[str, tuple[Any, str]] = {
    "random": (lambda: Late(random.random), "its code names draw in Late.__iter__"),
    "numpy": (lambda: Late(np.random.rand), "its code names draw in Late.__iter__"),
    "torch": (lambda: Late(lambda: torch.rand(()).item()), "its code names torch.rand"),
    "unnamed": (lambda: Late(lambda: getattr(torch, "".join(("ra", "nd")))(()).item()), "drew random numbers"),
    "a generator of its own": (Owned, "its code names rng in Owned.__iter__"),
    "order": (Shuffled, r"may not repeat: it drew random numbers.*mark_deterministic"),
    "epoch": (ByEpoch, "may not repeat"),
    "an iterator that it keeps": (Once, "raised TypeError|may not repeat"),
    "failed": (Broken, "a sample failed"),
    "marked": (lambda: sf.mark_random(Sized(5)), "marked as random"),
    "empty": (lambda: Sized(0), "empty"),
    "too large": (Large, "does not fit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_streams_are_read_in_each_epoch(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    make, why = REFUSED[case]
    for workers in (0, 2):
        with loader_of(make(), num_workers=workers, on_error="skip") as loader:
            for _ in range(3):
                assert all(batch is not None for batch in loader)
            assert loader.decision.startswith("no cache for the stream ")
            lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("stallfree:")]
            assert len(lines) == 1
            assert re.search(why, lines[0])


@pytest.mark.parametrize("make", [Shuffled, Owned, lambda: Late(random.random)])
def test_they_are_read_as_under_torch(make: Any) -> None:
    """Also by workers that persist, whose generators go on."""
    for arguments in ({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
        found = []
        for kind in (torch.utils.data.DataLoader, loader_of):
            dataset = make()
            torch.manual_seed(1), random.seed(2)
            loader = kind(dataset, batch_size=4, **arguments)
            found.append([[batch.tolist() for batch in loader] for _ in range(3)])
            if kind is loader_of:
                loader.close()
        assert found[0] == found[1]


def test_workers_that_are_started_again_do_not_repeat_their_draws() -> None:
    with loader_of(sf.mark_deterministic(Shuffled()), num_workers=1, persistent_workers=True) as loader:
        assert len({tuple(next(iter(loader)).tolist()) for _ in range(4)}) == 4


def test_the_user_knows_better() -> None:
    """Draws for the order alone do no harm."""
    with loader_of(sf.mark_deterministic(Shuffled())) as loader:
        assert [sorted(numbers(loader)) for _ in range(3)] == [list(range(8))] * 3
        assert "is cached" in loader.decision


def test_a_worker_that_died(tmp_path: Path) -> None:
    (tmp_path / "killing").touch()
    dataset = sf.mark_deterministic(Killed(str(tmp_path / "killing")))  # its code asks for its process
    with loader_of(dataset, num_workers=2, batch_size=1) as loader:
        iterator = iter(loader)
        with pytest.raises(WorkerError):
            list(iterator)
        list(iterator)
        assert "was not whole" in loader.decision
        (tmp_path / "killing").unlink()
        assert len(numbers(loader)) == 20


def test_an_endless_stream_is_never_cached() -> None:
    class Endless(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            number = 0
            while True:
                yield torch.full((1000,), number)
                number += 1

    with loader_of(Endless(), num_workers=1, capacity="1MiB") as loader:
        for _ in range(2):
            assert [batch[0, 0].item() for batch in islice(loader, 100)] == list(range(0, 400, 4))


def test_a_setting_that_changes() -> None:
    dataset = Range(0, 5)
    with loader_of(dataset) as loader:
        for _ in range(2):
            list(loader)
        dataset.end = 7
        with pytest.warns(StallfreeWarning, match="'end' of Range was 5"):
            assert len(numbers(loader)) == 5
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(loader)
