"""Collective operations by which all ranks of a job draw a plan from the same losses, masks and residency."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from stallfree.datasets.ranks import has_process_group, local_ranks
from stallfree.importance.plans.losses import Losses

Array = npt.NDArray[Any]

_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def ranks_of_job() -> tuple[int, int]:
    """The rank of this process in `torch.distributed`, and the number of ranks; (0, 1) if that is not initialised."""
    return (distributed.get_rank(), distributed.get_world_size()) if has_process_group() else (0, 1)


def is_first_here() -> bool:
    """Whether this is the first rank on its host. With several ranks, all of them must make the first call."""
    return ranks_of_job()[1] == 1 or local_ranks().rank == 0


def agree(losses: Losses, *masks: Array) -> None:
    """Combine the losses of all ranks, and each mask (bool) by OR. In place.

    A collective operation: every rank must call it at the same time. A sample with losses at several ranks gets their
    mean. Does nothing with a single rank.
    """
    if ranks_of_job()[1] == 1:
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
    """`number` of rank 0. A collective operation: every rank must call it at the same time."""
    if ranks_of_job()[1] == 1:
        return number
    given = torch.tensor(number)
    distributed.broadcast(given, src=0, group=_group())
    return int(given.item())


def unite(*masks: Array) -> None:
    """Combine each mask (bool) of all ranks by OR, in place. Every rank must call it at the same time."""
    if ranks_of_job()[1] == 1:
        return
    bits = torch.from_numpy(np.concatenate(masks).astype(np.uint8))
    distributed.all_reduce(bits, op=distributed.ReduceOp.MAX, group=_group())
    start = 0
    for mask in masks:
        mask[:] = bits[start : start + len(mask)].numpy()
        start += len(mask)


def resident_to_all(cache: Any, count: int) -> Array:
    """Which of `count` samples are resident for every rank, as an array of bool.

    These are the samples that the caches (or None) of all ranks hold, or that any node has stored in the servers of a
    tier which all nodes share. Every rank must call it at the same time, after all have ended the previous epoch.
    """
    ids = np.arange(count)
    tier = getattr(cache, "tier", None)
    if tier is not None and hasattr(tier.tier, "num_nodes"):
        tier.drain(ids)
        known: Array = tier.known(ids)
        unite(known)
        return known
    missing = np.ones(count, bool) if cache is None else ~np.asarray(cache.resident(ids), bool)
    unite(missing)
    return ~missing


def wait_for_all() -> None:
    """Return once every rank has called it."""
    unite(np.zeros(1, bool))


def num_steps(samples: int, ranks: int, batch_size: int, drop_last: bool) -> int:
    """The number of batches per rank of a plan with this number of samples."""
    together = batch_size * ranks
    if drop_last:
        return samples // together
    steps = -(-samples // together)
    return steps if ranks == 1 else min(steps, samples // ranks)


def steps_of(ids: Array, ranks: int, batch_size: int, drop_last: bool) -> list[list[Array]]:
    """The batches of a plan: for each step one per rank, of sizes that differ by at most one.

    With one rank, only the last batch may be smaller than `batch_size`. With `drop_last` all batches are full and the
    remaining ids are dropped; without it, a plan with fewer ids than ranks has no batches.
    """
    steps, together = num_steps(len(ids), ranks, batch_size, drop_last), batch_size * ranks
    if drop_last or ranks == 1:
        some = [ids[at : at + together] for at in range(0, steps * together, together)]
        return [[step[rank::ranks] for rank in range(ranks)] for step in some]
    parts = np.array_split(ids, steps * ranks) if steps else []
    return [parts[at : at + ranks] for at in range(0, len(parts), ranks)]


def _group() -> Any:
    """A process group for CPU tensors. All ranks create it together, once per job."""
    default: Any = distributed.group.WORLD
    if distributed.get_backend() == "gloo":
        return default
    if default not in _groups:
        _groups[default] = distributed.new_group(backend="gloo")
    return _groups[default]
