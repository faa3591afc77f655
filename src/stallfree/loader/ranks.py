"""Which rank of which job this process is."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import xxhash

from stallfree.errors import InputError

_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
"""Variables that the ranks of one job have in common."""


def job_name() -> str | None:
    """The same text in all ranks of one job on this host, another in other jobs; None if nothing tells.

    From the variables that torchrun, SLURM and the like set.
    """
    given = [os.environ.get(variable, "") for variable in _JOB]
    return xxhash.xxh3_64_hexdigest("|".join(given).encode())[:12] if any(given) else None


@dataclass(frozen=True)
class Ranks:
    """A process among those that train one model.

    Attributes:
        rank: its number, from 0.
        count: how many there are.
        here: how many of them are on this host.
    """

    rank: int
    count: int
    here: int


def find_ranks() -> Ranks:
    """As `torch.distributed` says if it is initialised, else the variables that torchrun sets; else one alone.

    Raises `InputError` for variables that are no numbers, or contradict each other.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        rank, count = environment_number("RANK", 0), environment_number("WORLD_SIZE", 1)
    here = environment_number("LOCAL_WORLD_SIZE", count)
    if not 0 <= rank < count or not 1 <= here <= count:
        raise InputError(
            f"rank {rank} of {count}, {here} on this host: RANK, WORLD_SIZE and LOCAL_WORLD_SIZE contradict each "
            "other. Start the job with torchrun, or correct them"
        )
    return Ranks(rank, count, here)


def environment_number(variable: str, default: int) -> int:
    """The whole number in an environment variable. Raises `InputError` for anything else."""
    given = os.environ.get(variable, "")
    try:
        return int(given) if given else default
    except ValueError as error:
        raise InputError(f"{variable}={given!r} in the environment: give a whole number, or unset it") from error
