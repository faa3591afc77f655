"""A job that resumes from a state gets each remaining sample of that epoch once, wherever the group is."""

import json
from typing import Any

import pytest
import torch

import stallfree as sf

SAMPLES = 40
BATCHES = 10


@pytest.fixture(autouse=True)
def one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


def loader(**changes: Any) -> sf.SharedLoader:
    arguments: dict[str, Any] = {
        "batch_size": 4, "shuffle": True, "seed": 1, "multiprocessing_context": "fork", **changes
    }  # fmt: skip
    return sf.SharedLoader(list(range(SAMPLES)), group="resume", **arguments)


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
    with loader() as shared:
        state = shared.state_dict()
    return {**state, "epoch": epoch, "batches": done}


@pytest.mark.parametrize("done", [2, 8], ids=["behind", "in front"])
def test_a_job_resumes_an_epoch_that_others_are_in(done: int) -> None:
    with loader() as other, loader() as shared:
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
    with loader() as other, loader() as shared:
        for _ in range(3):
            list(other)
        iterator = iter(other)
        next(iterator)
        shared.load_state_dict(saved(1, 1))
        with pytest.raises(sf.InputError, match="continues epoch 1, and the group 'resume' is in epoch"):
            iter(shared)
        assert len(list(iterator)) == BATCHES - 1


@pytest.mark.parametrize("count", [3, 10])
def test_a_state_taken_in_an_epoch(count: int) -> None:
    """Also after its last batch: the next epoch comes then."""
    with loader() as shared:
        iterator = iter(shared)
        begun = [next(iterator).tolist() for _ in range(count)]
        state = json.loads(json.dumps(shared.state_dict()))
    with loader() as shared:
        shared.load_state_dict(state)
        assert shared.state_dict() == state
        assert begun + [batch.tolist() for batch in shared] == plan(0)
        state = shared.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 0)
    with loader() as shared:
        shared.load_state_dict(state)
        assert [batch.tolist() for batch in shared] == plan(1)


def test_the_state_of_another_loader() -> None:
    state = saved(0, 0)
    for wrong in (None, {**state, "version": 99}, {"version": state["version"]}):
        with loader() as shared, pytest.raises(sf.InputError, match=r"^the state (has version|lacks)"):
            shared.load_state_dict(wrong)
    for changes in ({"seed": 2}, {"batch_size": 8}, {"drop_last": True}):
        with (
            loader(**changes) as shared,
            pytest.raises(sf.InputError, match=r"^the state was taken with .* give the same"),
        ):
            shared.load_state_dict(state)
    with loader() as shared:
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
        with loader(seed=None) as one, loader(seed=None) as other:
            assert one.seed is None
            first, second = epochs_of(one, other)
            assert one.seed == other.seed
            assert first == second
        return first

    runs = [run(1), run(2)]
    assert runs[0] != runs[1]
    assert run(1) == runs[0]


def test_a_job_that_resumes_has_the_seed_of_its_state() -> None:
    with loader(seed=None) as one:
        taken = iter(one)
        next(taken)
        state = json.loads(json.dumps(one.state_dict()))
        left = [batch.tolist() for batch in taken]
    with loader(seed=None) as one, loader(seed=None, timeout=1) as other:
        one.load_state_dict(state)
        assert [batch.tolist() for batch in one] == left
        one.close()
        list(other)
        assert other.seed == one.seed
    with (
        loader(seed=1),
        loader(seed=None) as other,
        pytest.raises(sf.InputError, match="it has seed=1, this job gives seed="),
    ):
        other.load_state_dict(state)


def test_a_group_draws_what_torchs_loader_draws() -> None:
    torch.manual_seed(1)
    with loader(seed=None) as one:
        list(one), list(one)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    plain = torch.utils.data.DataLoader(list(range(SAMPLES)), 4, shuffle=True)  # type: ignore[arg-type]
    list(plain), list(plain)
    assert torch.equal(drawn, torch.rand(3))
