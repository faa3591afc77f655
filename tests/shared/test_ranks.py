"""The rank and the job of a process: from `torch.distributed`, from the environment, or a single process."""

import itertools

import pytest
import torch

import stallfree as sf
from stallfree.datasets.ranks import Ranks, find_ranks, job_name

OF_A_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", *OF_A_JOB):
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


@pytest.mark.parametrize(("rank", "world", "local", "ranks"), [
    ("", "", "", Ranks(0, 1, 1)), ("3", "4", "", Ranks(3, 4, 4)), ("9", "16", "8", Ranks(9, 16, 8)),
    ("one", "", "", "RANK='one' in the environment: give a whole number, or unset it"),
    ("1", "", "", "rank 1 of 1, 1 on this host: RANK, WORLD_SIZE and LOCAL_WORLD_SIZE contradict each other"),
    ("-1", "2", "", "rank -1 of 2, 2 on this host"), ("", "0", "", "rank 0 of 0, 0 on this host"),
    ("", "2", "3", "rank 0 of 2, 3 on this host"),
])  # fmt: skip
def test_by_environment(rank: str, world: str, local: str, ranks: Ranks | str, environment: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local)):
        environment.setenv(name, value)
    if isinstance(ranks, Ranks):
        assert find_ranks() == ranks
        for name, given in (("is_initialized", True), ("get_rank", 5), ("get_world_size", 9)):  # which comes first
            environment.setattr(torch.distributed, name, lambda given=given: given)
        assert find_ranks() == Ranks(5, 9, int(local or 9))
    else:
        with pytest.raises(sf.InputError, match=f"^{ranks}"):
            find_ranks()


def test_the_name_of_a_job(environment: pytest.MonkeyPatch) -> None:
    """The name is the same in all ranks of a job and differs between jobs."""
    names = {job_name()}
    assert names == {None}
    for variable, value, rank in itertools.product(OF_A_JOB, "12", "01"):
        with environment.context() as job:
            job.setenv(variable, value)
            job.setenv("RANK", rank)
            names.add(job_name())
    assert len(names) == 1 + 2 * len(OF_A_JOB)
