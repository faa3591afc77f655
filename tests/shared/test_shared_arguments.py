"""Arguments, seeds and states of a `SharedLoader`, and errors where they are invalid or differ from the group's."""

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

import stallfree as sf
from stallfree.errors import text_of


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
    return sf.SharedLoader(list(range(24)) if dataset is None else dataset, **arguments)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_workers": 0}, "num_workers=0: the workers belong to the group, which needs 1 or more"),
        ({"batch_size": None}, "batch_size=None: give the number of samples per batch"),
        ({"job_transform": 3}, "job_transform=3 cannot be called: give a function, or None"),
        ({"on_error": "ignore"}, "on_error='ignore': use 'raise' or 'skip'"),
        ({"staging": "much"}, "staging='much' is no size: give bytes"),
        ({"multiprocessing_context": "thread"}, "multiprocessing_context='thread': give 'fork', 'forkserver'"),
        ({"dataset": []}, ".*at least one sample"),
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
        ({"dataset": list(range(23))}, "the data set differs (its code, parameters or files)"),
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
        return sf.CachedDataset(list(range(24)), capacity="1MiB", seed=5, transform=transform)

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


# -- states: a job that resumes gets each remaining sample of that epoch once, wherever the group is -------------------

SAMPLES, BATCHES = 40, 10


def resumable(**changes: Any) -> sf.SharedLoader:
    return loader(list(range(SAMPLES)), **{"shuffle": True, "multiprocessing_context": "fork", **changes})


def plan(epoch: int) -> list[list[int]]:
    """Return the batches of an epoch from another loader."""
    plain = sf.DataLoader(list(range(SAMPLES)), 4, shuffle=True, seed=1)
    for _ in range(epoch):
        next(iter(plain))
    batches = [batch.tolist() for batch in plain]
    plain.close()
    return batches


def saved(epoch: int, done: int) -> dict[str, Any]:
    """Return the state of a job that received the first batches of an epoch."""
    with resumable() as shared:
        state = shared.state_dict()
    return {**state, "epoch": epoch, "batches": done}


@pytest.mark.parametrize("done", [2, 8], ids=["behind", "in front"])
def test_a_job_resumes_an_epoch_that_others_are_in(done: int) -> None:
    with resumable() as other, resumable() as shared:
        list(other)
        going = iter(other)
        taken = [next(going).tolist() for _ in range(BATCHES // 2)]
        shared.load_state_dict(saved(1, done))
        resumed = iter(shared)
        if done > BATCHES // 2:
            taken += [batch.tolist() for batch in going]
        got = [batch.tolist() for batch in resumed]
        assert got == plan(1)[done:]
        assert taken + [batch.tolist() for batch in going] == plan(1)


def test_a_job_cannot_resume_an_epoch_that_is_over() -> None:
    with resumable() as other, resumable() as shared:
        for _ in range(3):
            list(other)
        iterator = iter(other)
        next(iterator)
        shared.load_state_dict(saved(1, 1))
        with pytest.raises(sf.InputError, match="continues epoch 1, and the group 'args' is in epoch"):
            iter(shared)
        assert len(list(iterator)) == BATCHES - 1


@pytest.mark.parametrize("count", [3, 10])
def test_a_state_taken_in_an_epoch(count: int) -> None:
    """Also after its last batch: the next epoch comes then."""
    with resumable() as shared:
        iterator = iter(shared)
        begun = [next(iterator).tolist() for _ in range(count)]
        state = json.loads(json.dumps(shared.state_dict()))
    with resumable() as shared:
        shared.load_state_dict(state)
        assert shared.state_dict() == state
        assert begun + [batch.tolist() for batch in shared] == plan(0)
        state = shared.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 0)
    with resumable() as shared:
        shared.load_state_dict(state)
        assert [batch.tolist() for batch in shared] == plan(1)


def test_the_state_of_another_loader() -> None:
    state = saved(0, 0)
    for wrong in (None, {**state, "version": 99}, {"version": state["version"]}):
        with resumable() as shared, pytest.raises(sf.InputError, match=r"^the state (has version|lacks)"):
            shared.load_state_dict(wrong)
    for changes in ({"seed": 2}, {"batch_size": 8}, {"drop_last": True}):
        with (
            resumable(**changes) as shared,
            pytest.raises(sf.InputError, match=r"^the state was taken with .* give the same"),
        ):
            shared.load_state_dict(state)
    with resumable() as shared:
        next(iter(shared))
        with pytest.raises(sf.InputError, match="in its group already: load the state before the first iteration"):
            shared.load_state_dict(state)


def epochs_of(*loaders: sf.SharedLoader) -> list[list[Any]]:
    """Return the batches of an epoch of each loader, iterated side by side."""
    batches = [[batch.tolist() for batch in taken] for taken in zip(*loaders, strict=True)]
    return [list(each) for each in zip(*batches, strict=True)]


def test_jobs_without_a_seed_have_the_groups() -> None:
    """The first job that iterates draws the seed; a new group draws another one."""

    def run(seed: int) -> Any:
        torch.manual_seed(seed)
        with resumable(seed=None) as one, resumable(seed=None) as other:
            assert one.seed is None
            first, second = epochs_of(one, other)
            assert one.seed == other.seed
            assert first == second
        return first

    runs = [run(1), run(2)]
    assert runs[0] != runs[1]
    assert run(1) == runs[0]


def test_a_job_that_resumes_has_the_seed_of_its_state() -> None:
    with resumable(seed=None) as one:
        taken = iter(one)
        next(taken)
        state = json.loads(json.dumps(one.state_dict()))
        left = [batch.tolist() for batch in taken]
    with resumable(seed=None) as one, resumable(seed=None, timeout=1) as other:
        one.load_state_dict(state)
        assert [batch.tolist() for batch in one] == left
        one.close()
        list(other)
        assert other.seed == one.seed
    with (
        resumable(seed=1),
        resumable(seed=None) as other,
        pytest.raises(sf.InputError, match="it has seed=1, this job gives seed="),
    ):
        other.load_state_dict(state)


def test_a_group_draws_what_torchs_loader_draws() -> None:
    torch.manual_seed(1)
    with resumable(seed=None) as one:
        list(one), list(one)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    plain = torch.utils.data.DataLoader(list(range(SAMPLES)), 4, shuffle=True)  # type: ignore[arg-type]
    list(plain), list(plain)
    assert torch.equal(drawn, torch.rand(3))
