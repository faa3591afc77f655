"""Arguments of a `SharedLoader`: an invalid value, or one that differs from the group's, raises a clear error."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import IterableDataset, default_collate

import stallfree as sf
from stallfree.errors import text_of


class Numbers:
    """A data set."""

    def __init__(self, count: int = 24, offset: int = 0) -> None:
        self.count, self.offset = count, offset

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> int:
        if not 0 <= id < self.count:
            raise IndexError(id)
        return id + self.offset


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


def as_list(samples: list[Any]) -> list[Any]:
    return list(samples)


@pytest.fixture(autouse=True)
def one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


def loader(dataset: Any = None, **changes: Any) -> sf.SharedLoader:
    arguments: dict[str, Any] = {"group": "args", "batch_size": 4, "seed": 1, **changes}
    return sf.SharedLoader(Numbers() if dataset is None else dataset, **arguments)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_workers": 0}, "num_workers=0: the workers belong to the group, which needs 1 or more"),
        ({"batch_size": None}, "batch_size=None: give the number of samples per batch"),
        ({"job_transform": 3}, "job_transform=3 cannot be called: give a function, or None"),
        ({"on_error": "ignore"}, "on_error='ignore': use 'raise' or 'skip'"),
        ({"staging": "much"}, "staging='much' is no size: give bytes"),
        ({"multiprocessing_context": "thread"}, "multiprocessing_context='thread': give 'fork', 'forkserver'"),
        ({"dataset": Numbers(0)}, ".*at least one sample"),
        ({"dataset": Endless()}, "Endless is an IterableDataset"),
        ({"group": ""}, "group='': give a name of 1 to 110 of the letters"),
        ({"group": "a/b"}, "group='a/b'"),
        ({"group": None}, "group=None"),
    ],
)
def test_arguments_that_cannot_be_used(changed: dict[str, Any], said: str, store_root: Path) -> None:
    before = set(store_root.iterdir())
    with pytest.raises(sf.InputError, match=f"^{said}") as caught:
        loader(**changed)
    assert "\n" not in text_of(caught.value)
    assert set(store_root.iterdir()) == before


def test_multiples_and_divisors_go_together(store_root: Path) -> None:
    with loader(batch_size=4) as first, loader(batch_size=100) as second, loader(batch_size=2) as third:
        assert [len(first), len(second), len(third)] == [6, 1, 12]
        before = sorted(store_root.rglob("*"))
        for size in (3, 6):
            said = f"^batch_size={size} does not match the group 'args', whose first job has batches of 4 samples: give"
            with pytest.raises(sf.InputError, match=said):
                loader(batch_size=size)
        assert sorted(store_root.rglob("*")) == before


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dataset": Numbers(23)}, "the data set differs (its code, parameters or files)"),
        ({"seed": 2}, "it has seed=1, this job gives seed=2"),
        ({"shuffle": True}, "it has shuffle=False, this job gives shuffle=True"),
        ({"collate_fn": as_list}, "collate_fn differs (its code, parameters or files)"),
        ({"on_error": "skip"}, "it has on_error='raise', this job gives on_error='skip'"),
        ({"drop_last": True}, "it has drop_last=False, this job gives drop_last=True"),
    ],
)
def test_a_difference_is_named(given: dict[str, Any], said: str, store_root: Path) -> None:
    with loader():
        before = sorted(store_root.rglob("*"))
        with pytest.raises(sf.InputError) as caught:
            loader(**given)
        assert text_of(caught.value) == (
            f"this job does not fit into the group 'args': {said}. Give the same, or the name of another group"
        )
        assert sorted(store_root.rglob("*")) == before
        loader(collate_fn=default_collate).close()  # one that fits is let in all the same
        loader(group="other", **given).close()
    loader(**given).close()  # and when all of them are gone, it is another group


def test_the_seed_and_the_transform_of_a_cached_data_set_count() -> None:
    def cached(transform: Any = None) -> sf.CachedDataset:
        return sf.CachedDataset(Numbers(), capacity="1MiB", seed=5, transform=transform)

    with cached() as dataset, cached(str) as other, loader(dataset, seed=None):
        loader(dataset, seed=5).close()
        for given, seed, said in (
            (dataset, 6, "it has seed=5, this job gives seed=6"),
            (other, 5, "the transform differs"),
        ):
            with pytest.raises(sf.InputError, match=said):
                loader(given, seed=seed)


def test_batches_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with loader() as shared:
        assert len(shared) == 3
        with pytest.raises(
            sf.InputError,
            match=r"^batch_size=3 on each of 2 ranks does not match the group .*, whose first job has batches of 8",
        ):
            loader(batch_size=3)
        loader(batch_size=8).close()
    with pytest.raises(sf.InputError, match=r"^batch_size=4 on 2 ranks.* use one rank, and the same batch_size"):
        loader(collate_fn=as_list)
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(sf.InputError, match=r"^RANK='two'"):
        loader()


def test_the_first_job_decides_though_another_one_begins() -> None:
    with (
        loader(num_workers=2, prefetch_factor=3, staging="1MiB") as first,
        loader(num_workers=1, multiprocessing_context="fork") as second,
    ):
        assert first.stats().num_workers == second.stats().num_workers == 2
        assert [batch.tolist() for batch in second] == [[*range(at, at + 4)] for at in range(0, 24, 4)]
        (coordinator,) = (one for one in multiprocessing.active_children() if one.name == "stallfree-coordinator")
        assert len(psutil.Process(coordinator.pid).children()) == 2
        assert second.stats().staging_bytes <= 1 << 20


def test_a_closed_loader() -> None:
    shared = loader()
    iterator = iter(shared)
    next(iterator)
    shared.close()
    shared.close()
    assert list(iterator) == []
    with pytest.raises(sf.InputError, match=r"^the loader of the group 'args' is closed: make a new one"):
        iter(shared)
    assert len(shared) == 6


def test_a_group_of_another_release(store_root: Path) -> None:
    with loader():
        meta = store_root / "group-args" / "group.json"
        meta.write_text(meta.read_text().replace('"version": 4', '"version": 99'))
        with pytest.raises(sf.InputError, match="made by another release of stallfree: give another name"):
            loader()


@pytest.mark.parametrize("content", ["", "[]", '{"version": 4}'])
def test_a_damaged_group(content: str, store_root: Path) -> None:
    with loader():
        (store_root / "group-args" / "group.json").write_text(content)
        with pytest.raises(sf.StorageError, match=r"^the group's folder .* cannot be read: .* Give another name\n"):
            loader()
