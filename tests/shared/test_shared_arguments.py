"""Arguments, seeds and states of a `SharedLoader`, and errors where they are invalid or differ from the group's."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from group_jobs import ids_of
from torch.utils.data import default_collate

import stallfree as sf


def loader(dataset: Any = None, **changes: Any) -> sf.SharedLoader:
    arguments: dict[str, Any] = {"group": "args", "batch_size": 4, "seed": 1, **changes}
    return sf.SharedLoader(list(range(24)) if dataset is None else dataset, **arguments)


@pytest.mark.parametrize(("ranks", "lengths"), [(1, {4: 6, 100: 1, 2: 12}), (2, {4: 3, 8: 2})])
def test_multiples_or_divisors_fit(ranks: int, lengths: Any, store_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with loader():
        before = sorted(store_root.rglob("*"))
        for size, length in lengths.items():
            with loader(batch_size=size) as other:
                assert len(other) == length
        for size in (3, 6):
            said = rf"^batch_size={size} \(ranks: {ranks}\) does not match .* batches of {4 * ranks}: give a multiple"
            with pytest.raises(sf.InputError, match=said):
                loader(batch_size=size)
        assert sorted(store_root.rglob("*")) == before
    if ranks > 1:
        with pytest.raises(sf.InputError, match=r"^batch_size=4 \(ranks: 2\) .* the same, on one rank, since"):
            loader(collate_fn=list)


@pytest.mark.parametrize(("given", "said"), [
    ({"dataset": list(range(23))}, "the data set differs"), ({"seed": 2}, r"seed differs \(it has 1, this job 2\)"),
    ({"shuffle": True}, r"shuffle differs \(it has False, this job True\)"),
    ({"collate_fn": list}, "collate_fn differs"), ({"on_error": "skip"}, "on_error differs"),
    ({"drop_last": True}, "drop_last differs"),
])  # fmt: skip
def test_a_difference_is_named(given: dict[str, Any], said: str, store_root: Path) -> None:
    with loader():
        before = sorted(store_root.rglob("*"))
        with pytest.raises(sf.InputError, match=f"the group 'args': {said}.* Give the same, or the name of another"):
            loader(**given)
        assert sorted(store_root.rglob("*")) == before
        loader(collate_fn=default_collate).close()  # one that fits is let in all the same
        loader(group="other", **given).close()
    loader(**given).close()  # and when all of them are gone, it is another group


def test_the_seed_and_the_transform_of_a_cached_data_set_count() -> None:
    def cached(transform: Any = None) -> sf.CachedDataset:
        return sf.CachedDataset(list(range(24)), capacity="1MiB", seed=5, transform=transform)

    with cached() as dataset, cached(str) as other, loader(dataset, seed=None):
        loader(dataset, seed=5).close()
        for given, seed, said in ((dataset, 6, "seed differs"), (other, 5, "the transform differs")):
            with pytest.raises(sf.InputError, match=said):
                loader(given, seed=seed)


def test_the_first_job_decides_though_another_one_begins() -> None:
    ours, theirs = {"prefetch_factor": 3, "staging": "1MiB"}, {"multiprocessing_context": "fork"}
    with loader(num_workers=2, **ours) as first, loader(num_workers=1, **theirs) as second:
        assert first.stats().num_workers == second.stats().num_workers == 2
        assert ids_of(second) == [[*range(at, at + 4)] for at in range(0, 24, 4)]
        (coordinator,) = (one for one in multiprocessing.active_children() if one.name == "stallfree-coordinator")
        assert len(psutil.Process(coordinator.pid).children()) == 2
        assert second.stats().staging_bytes <= 1 << 20


def test_a_closed_loader() -> None:
    shared = loader()
    iterator = iter(shared)
    next(iterator)
    shared.close(), shared.close()
    assert list(iterator) == []
    with pytest.raises(sf.InputError, match=r"^the loader of the group 'args' is closed: make a new one"):
        iter(shared)
    assert len(shared) == 6


def test_a_group_that_is_damaged_or_of_another_release(store_root: Path) -> None:
    with loader():
        terms = store_root / "group-args" / "group.json"
        for content in (terms.read_text().replace('"protocol": ', '"protocol": 9'), "", "[]", '{"version": 4}'):
            terms.write_text(content)
            with pytest.raises(sf.StallfreeError, match=r"(protocol differs|^the group's folder .* cannot be read)"):
                loader()


SAMPLES, BATCHES = 40, 10


def resumable(**changes: Any) -> sf.SharedLoader:
    return loader(list(range(SAMPLES)), **{"shuffle": True, "multiprocessing_context": "fork", **changes})


def plan(epoch: int) -> list[list[int]]:
    """Return the batches of an epoch from another loader."""
    with sf.DataLoader(list(range(SAMPLES)), 4, shuffle=True, seed=1) as plain:
        plain.set_epoch(epoch)
        return ids_of(plain)


def saved(epoch: int, done: int) -> dict[str, Any]:
    """Return the state of a job that received the first batches of an epoch."""
    with resumable() as shared:
        return {**shared.state_dict(), "epoch": epoch, "batches": done}


@pytest.mark.parametrize("done", [2, 8], ids=["behind", "in front"])
def test_a_job_resumes_an_epoch_that_others_are_in(done: int) -> None:
    with resumable() as other, resumable() as shared:
        list(other)
        going = iter(other)
        taken = [next(going).tolist() for _ in range(BATCHES // 2)]
        shared.load_state_dict(saved(1, done))
        resumed = iter(shared)
        if done > BATCHES // 2:
            taken += ids_of(going)
        assert ids_of(resumed) == plan(1)[done:]
        assert taken + ids_of(going) == plan(1)


def test_a_job_cannot_resume_an_epoch_that_is_over() -> None:
    with resumable() as other, resumable() as shared:
        list(other), list(other)
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
        assert begun + ids_of(shared) == plan(0)
        state = shared.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 0)
    with resumable() as shared:
        shared.load_state_dict(state)
        assert ids_of(shared) == plan(1)


def test_the_state_of_another_loader() -> None:
    state = saved(0, 0)
    for wrong in (None, {**state, "version": 99}, {"version": state["version"]}):
        with resumable() as shared, pytest.raises(sf.InputError, match=r"^the state (has version|lacks)"):
            shared.load_state_dict(wrong)
    for changes in ({"seed": 2}, {"batch_size": 8}, {"drop_last": True}):
        with resumable(**changes) as shared, pytest.raises(sf.InputError, match=r"^the state was taken with .*: give"):
            shared.load_state_dict(state)
    with resumable() as shared:
        next(iter(shared))
        with pytest.raises(sf.InputError, match="in its group already: load the state before the first iteration"):
            shared.load_state_dict(state)


def test_jobs_without_a_seed_have_the_groups() -> None:
    """The first job that iterates draws the seed; a new group draws another one."""

    def run(seed: int) -> Any:
        torch.manual_seed(seed)
        with resumable(seed=None) as one, resumable(seed=None) as other:
            assert one.seed is None
            pairs = [(first.tolist(), second.tolist()) for first, second in zip(one, other, strict=True)]
            assert one.seed == other.seed
        assert all(first == second for first, second in pairs)
        return pairs

    assert run(1) == run(1) != run(2)


def test_a_job_that_resumes_has_the_seed_of_its_state() -> None:
    with resumable(seed=None) as one:
        taken = iter(one)
        next(taken)
        state = json.loads(json.dumps(one.state_dict()))
        left = ids_of(taken)
    with resumable(seed=None) as one, resumable(seed=None) as other:
        one.load_state_dict(state)
        assert ids_of(one) == left
        one.close()
        list(other)
        assert other.seed == one.seed
    with resumable(seed=1), resumable(seed=None) as other, pytest.raises(sf.InputError, match="seed differs"):
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
