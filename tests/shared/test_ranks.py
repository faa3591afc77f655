"""The rank and the job of a process: from `torch.distributed`, from the environment, or a single process."""

from __future__ import annotations

import pytest
import torch

import stallfree as sf
from stallfree.datasets.ranks import Ranks, find_ranks, job_name

VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)  # fmt: skip


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, Ranks(0, 1, 1)),
        ({"RANK": "", "WORLD_SIZE": ""}, Ranks(0, 1, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, Ranks(3, 4, 4)),
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, Ranks(9, 16, 8)),
        ({"RANK": "one"}, "RANK='one' in the environment: give a whole number, or unset it"),
        ({"RANK": "1"}, "rank 1 of 1, 1 on this host: RANK, WORLD_SIZE and LOCAL_WORLD_SIZE contradict each other"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1 of 2, 2 on this host"),
        ({"WORLD_SIZE": "0"}, "rank 0 of 0, 0 on this host"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, "rank 0 of 2, 3 on this host"),
    ],
)
def test_by_the_environment(variables: dict[str, str], ranks: Ranks | str, environment: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    if isinstance(ranks, Ranks):
        assert find_ranks() == ranks
    else:
        with pytest.raises(sf.InputError, match=f"^{ranks}"):
            find_ranks()


def test_the_ranks_of_torch_distributed_come_first(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(torch.distributed, "is_initialized", lambda: True)
    environment.setattr(torch.distributed, "get_rank", lambda: 5)
    environment.setattr(torch.distributed, "get_world_size", lambda: 6)
    environment.setenv("LOCAL_WORLD_SIZE", "2")
    environment.setenv("RANK", "3")
    assert find_ranks() == Ranks(5, 6, 2)


def test_the_name_of_a_job(environment: pytest.MonkeyPatch) -> None:
    """The name is the same in all ranks of a job and differs between jobs."""
    assert job_name() is None
    names = set()
    for variable in VARIABLES[3:]:
        for value in ("1", "2"):
            environment.setenv(variable, value)
            names.add(job_name())
            environment.setenv("RANK", value)
            names.add(job_name())
        environment.delenv(variable)
    assert len(names) == 2 * len(VARIABLES[3:])
