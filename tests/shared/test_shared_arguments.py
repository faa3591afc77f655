"""Arguments of a `SharedLoader`: an invalid value, or one that differs from the group's, raises a clear error."""

from __future__ import annotations

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


def plus(sample: int) -> int:
    return sample + 1


def minus(sample: int) -> int:
    return sample - 1


def as_list(samples: list[Any]) -> list[Any]:
    return list(samples)


def as_tuple(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(samples)


@pytest.fixture(autouse=True)
def one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


def the_coordinator() -> psutil.Process:
    """Return the only coordinator that this process has started."""
    (process,) = [child for child in multiprocessing.active_children() if child.name == "stallfree-coordinator"]
    return psutil.Process(process.pid)


def loader(dataset: Any = None, **changes: Any) -> sf.SharedLoader:
    arguments: dict[str, Any] = {"group": "args", "batch_size": 4, "seed": 1, **changes}
    return sf.SharedLoader(Numbers() if dataset is None else dataset, **arguments)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_workers": 0}, "num_workers=0: the workers belong to the group, which needs 1 or more"),
        ({"num_workers": True}, "num_workers=True: give "),
        ({"batch_size": None}, "batch_size=None: give the number of samples per batch"),
        ({"batch_size": 0}, "batch_size=0: give a whole number, 1 or more"),
        ({"batch_size": "4"}, "batch_size='4': give a whole number, 1 or more"),
        ({"collate_fn": 3}, "collate_fn=3 cannot be called: give a function, or None"),
        ({"worker_init_fn": "x"}, "worker_init_fn='x' cannot be called: give a function, or None"),
        ({"job_transform": 3}, "job_transform=3 cannot be called: give a function, or None"),
        ({"timeout": -1}, "timeout=-1: give seconds"),
        ({"prefetch_factor": 0}, "prefetch_factor=0: give a whole number, 1 or more"),
        ({"seed": "x"}, "seed='x': give a whole number"),
        ({"on_error": "ignore"}, "on_error='ignore': use 'raise' or 'skip'"),
        ({"staging": "much"}, "staging='much' is no size: give bytes"),
        ({"staging": -1}, "staging=-1 is negative"),
        ({"multiprocessing_context": "thread"}, "multiprocessing_context='thread': give 'fork', 'forkserver'"),
        ({"multiprocessing_context": 3}, "multiprocessing_context=3: give 'fork'"),
        ({"dataset": Numbers(0)}, ".*at least one sample"),
        ({"dataset": Endless()}, "Endless is an IterableDataset"),
        ({"dataset": 3}, ".*int"),
        ({"dataset": Numbers}, "Numbers is a class: give an instance of it"),
    ],
)
def test_arguments_that_cannot_be_used(given: dict[str, Any], said: str, store_root: Path) -> None:
    before = set(store_root.iterdir())
    with pytest.raises(sf.InputError, match=f"^{said}") as caught:
        loader(**given)
    assert "\n" not in text_of(caught.value)
    assert set(store_root.iterdir()) == before


@pytest.mark.parametrize("group", ["", "a/b", "x" * 200, "a\nb", None])
def test_names_that_cannot_be(group: Any) -> None:
    with pytest.raises(sf.InputError) as caught:
        loader(group=group)
    assert "\n" not in text_of(caught.value)
    assert repr(group)[1:-1] in str(caught.value)
    assert "group" in str(caught.value)


@pytest.mark.parametrize("sizes", [(4, 8), (4, 2), (100, 4), (7, 1)])
def test_multiples_and_divisors_go_together(sizes: tuple[int, int]) -> None:
    with loader(batch_size=sizes[1]) as first, loader(batch_size=sizes[0]) as second:
        assert (len(first), len(second)) == (-(-24 // sizes[1]), -(-24 // sizes[0]))


def test_a_length_without_the_last_batch() -> None:
    with loader(batch_size=10, drop_last=True) as first, loader(batch_size=5, drop_last=True) as second:
        assert (len(first), len(second)) == (2, 4)
    with loader(batch_size=25, drop_last=True) as shared:
        assert len(shared) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dataset": Numbers(23)}, "the data set differs (its code, parameters or files)"),
        ({"dataset": Numbers(24, 1)}, "the data set differs (its code, parameters or files)"),
        ({"dataset": list(range(24))}, "the data set differs (its code, parameters or files)"),
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
        loader().close()  # one that fits is let in all the same
        loader(group="other", **given).close()
    loader(**given).close()  # and when all of them are gone, it is another group


def test_all_differences_are_named() -> None:
    with loader(), pytest.raises(sf.InputError) as caught:
        loader(Numbers(3), seed=7, shuffle=True, drop_last=True, collate_fn=as_tuple, on_error="skip")
    for word in ("the data set", "seed=7", "shuffle=True", "drop_last=True", "collate_fn", "on_error='skip'"):
        assert str(caught.value).count(word) == 1


def test_another_collate_fn() -> None:
    with loader(collate_fn=as_list):
        loader(collate_fn=as_list).close()
        for other in (as_tuple, None, default_collate):
            with pytest.raises(sf.InputError, match="collate_fn differs"):
                loader(collate_fn=other)
    with loader(collate_fn=None):
        loader(collate_fn=default_collate).close()  # which is what None stands for


def test_another_transform() -> None:
    def cached(transform: Any) -> sf.CachedDataset:
        return sf.CachedDataset(Numbers(), capacity="1MiB", transform=transform, seed=1)

    with cached(plus) as dataset, cached(minus) as other, cached(plus) as same, loader(dataset):
        with pytest.raises(sf.InputError, match=r"group 'args': the transform differs \(its code, param[^;]*$"):
            loader(other)
        loader(same).close()


def test_the_seed_of_a_cached_data_set_counts() -> None:
    with sf.CachedDataset(Numbers(), capacity="1MiB", seed=5) as dataset, loader(dataset, seed=None):
        loader(dataset, seed=5).close()
        with pytest.raises(sf.InputError, match="it has seed=5, this job gives seed=6"):
            loader(dataset, seed=6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"batch_size": 6},
            "batch_size=6 does not match the group 'args', whose first job has batches of 4 samples: give",
        ),
        (
            {"batch_size": 3},
            "batch_size=3 does not match the group 'args', whose first job has batches of 4 samples: give",
        ),
    ],
)
def test_batches_that_do_not_fit(given: dict[str, Any], said: str, store_root: Path) -> None:
    with loader():
        before = sorted(store_root.rglob("*"))
        with pytest.raises(sf.InputError, match=f"^{said}"):
            loader(**given)
        assert sorted(store_root.rglob("*")) == before
        loader(batch_size=12).close()
        loader(batch_size=2).close()


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
        coordinator = the_coordinator()
        assert len(coordinator.children()) == 2
        assert second.stats().staging_bytes <= 1 << 20


def test_a_closed_loader() -> None:
    shared = loader()
    shared.close()
    shared.close()
    with pytest.raises(sf.InputError, match=r"^the loader of the group 'args' is closed: make a new one"):
        iter(shared)
    assert len(shared) == 6


def test_a_group_of_another_release(store_root: Path) -> None:
    with loader():
        meta = store_root / "group-args" / "group.json"
        meta.write_text(meta.read_text().replace('"version": 3', '"version": 99'))
        with pytest.raises(sf.InputError, match="made by another release of stallfree: give another name"):
            loader()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 3}', '{"version": 3, "other": 2}'])
def test_a_damaged_group(content: str, store_root: Path) -> None:
    with loader():
        (store_root / "group-args" / "group.json").write_text(content)
        with pytest.raises(sf.StorageError, match=r"^the group's folder .* cannot be read: .* Give another name\n"):
            loader()
