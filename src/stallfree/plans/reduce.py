"""The ranks of a job agree on what a plan is drawn from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from stallfree.plans.losses import Losses

Array = npt.NDArray[Any]

_groups: dict[int, Any] = {}


@dataclass(frozen=True)
class Ranks:
    """Number of this rank, and of all."""

    rank: int
    count: int

    @property
    def first_here(self) -> bool:
        """Whether it is the first rank on its host, as torchrun, SLURM or Open MPI say; True where nothing tells."""
        for variable in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
            if os.environ.get(variable):
                return self.count == 1 or os.environ[variable] == "0"
        return True


def ranks_of_job() -> Ranks:
    """This process among the ranks of `torch.distributed`; alone where that is not initialised."""
    if distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    return Ranks(0, 1)


def agree(losses: Losses, *masks: Array) -> None:
    """Bring the losses of all ranks together, and make each mask (bool) what it is for any of them. In place.

    Every rank must call it at the same time. A sample that had losses at several ranks gets their mean. Nothing happens
    where there is only one rank.
    """
    if ranks_of_job().count == 1:
        return
    group = _group()
    fresh = losses.fresh
    table = torch.zeros((2, losses.count))
    table[0][torch.from_numpy(fresh)] = torch.from_numpy(losses.last[fresh])
    table[1] = torch.from_numpy(fresh)
    distributed.all_reduce(table, group=group)
    sums, times = table.numpy()
    seen = times > 0
    losses.last[seen] = sums[seen] / times[seen]
    fresh[:] = False
    bits = torch.from_numpy(np.concatenate(masks).astype(np.uint8))
    distributed.all_reduce(bits, op=distributed.ReduceOp.MAX, group=group)
    start = 0
    for mask in masks:
        mask[:] = bits[start : start + len(mask)].numpy()
        start += len(mask)


def _group() -> Any:
    """A group that takes tensors in memory. All ranks make it together, once per job."""
    default = distributed.group.WORLD
    if distributed.get_backend() == "gloo":
        return default
    key = id(default)
    if key not in _groups:
        _groups.clear()
        _groups[key] = distributed.new_group(backend="gloo")
    return _groups[key]
