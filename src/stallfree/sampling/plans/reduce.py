"""The ranks of a job agree on what a plan is drawn from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from stallfree.sampling.plans.losses import Losses

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
    fresh = losses.fresh
    table = torch.zeros((2, losses.count))
    table[0][torch.from_numpy(fresh)] = torch.from_numpy(losses.last[fresh])
    table[1] = torch.from_numpy(fresh)
    distributed.all_reduce(table, group=_group())
    sums, times = table.numpy()
    seen = times > 0
    losses.last[seen] = sums[seen] / times[seen]
    fresh[:] = False
    unite(*masks)


def of_first_rank(number: int) -> int:
    """`number` as rank 0 has it. Every rank must call it at the same time."""
    if ranks_of_job().count == 1:
        return number
    given = torch.tensor(number)
    distributed.broadcast(given, src=0, group=_group())
    return int(given.item())


def unite(*masks: Array) -> None:
    """Make each mask (bool) what it is for any rank. In place; every rank must call it at the same time."""
    if ranks_of_job().count == 1:
        return
    bits = torch.from_numpy(np.concatenate(masks).astype(np.uint8))
    distributed.all_reduce(bits, op=distributed.ReduceOp.MAX, group=_group())
    start = 0
    for mask in masks:
        mask[:] = bits[start : start + len(mask)].numpy()
        start += len(mask)


def resident_to_all(cache: Any, count: int) -> Array:
    """Which of `count` samples every rank has at hand in its cache (or None), as an array of bool.

    That is what all their caches hold, or what the servers of a cache hold (its attribute `servers`). Every rank must
    call it at the same time, and when all have ended the epoch before.
    """
    ids = np.arange(count)
    servers = getattr(cache, "servers", None)
    if servers is not None:
        servers.drain(ids)
        wait_for_all()  # all nodes have stored what they handed over
        there: Array = servers.verify(ids) if ranks_of_job().first_here else np.zeros(count, bool)
        unite(there)
        servers.learn(there)
        return there
    missing = np.ones(count, bool) if cache is None else ~np.asarray(cache.resident(ids), bool)
    unite(missing)
    return ~missing


def wait_for_all() -> None:
    """Come back when every rank has called it."""
    unite(np.zeros(1, bool))


def steps_of(ids: Array, ranks: int, batch_size: int, drop_last: bool) -> list[list[Array]]:
    """The batches of a plan: for each step one for each rank, of sizes that differ by one at most.

    With one rank, only the last batch may be smaller than `batch_size`. With `drop_last` all batches are full, and what
    is left is in none; without, a plan with fewer ids than ranks has none.
    """
    together = batch_size * ranks
    if drop_last or ranks == 1:
        steps = len(ids) // together if drop_last else -(-len(ids) // together)
        some = [ids[at : at + together] for at in range(0, steps * together, together)]
        return [[step[rank::ranks] for rank in range(ranks)] for step in some]
    steps = min(-(-len(ids) // together), len(ids) // ranks)
    parts = np.array_split(ids, steps * ranks) if steps else []
    return [parts[at : at + ranks] for at in range(0, len(parts), ranks)]


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
