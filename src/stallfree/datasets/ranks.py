"""The rank and job of this process, the samples of each rank, and warnings if all ranks have the same ones."""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.utils.data import DistributedSampler

from stallfree.datasets.epoch_source import make_plan
from stallfree.errors import (
    InputError,
    StallfreeWarning,
    WaitError,
    cache_required,
    launch_environment,
    ranks_conflict,
    seed_agreement,
)
from stallfree.frames import users_level
from stallfree.units import parse_whole

if TYPE_CHECKING:
    from stallfree.datasets.cached_dataset import CachedDataset

_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
"""Environment variables that are equal in all ranks of one job."""

_LOCAL = (("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"))
"""Environment variables of torchrun and Open MPI: number of a rank on its host, and number of ranks there."""

AGREE_SECONDS = 300.0
"""Longest wait for the value of rank 0."""

_LOOK_SECONDS = 0.02

Ids = npt.NDArray[np.int64]


def job_name() -> str | None:
    """A name that is the same in all ranks of one job on this host and different in other jobs; None if unknown.

    From the environment variables of torchrun, SLURM and other launchers, and the store of the process group.
    """
    values = [os.environ.get(variable, "") for variable in _JOB]
    if has_process_group() and torch.distributed.get_world_size() > 1:
        store: Any = _default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        values += [str(getattr(store, name, "")) for name in ("host", "port", "path")]
    return xxhash.xxh3_64_hexdigest("|".join(values).encode())[:12] if any(values) else None


@dataclass(frozen=True)
class Ranks:
    """The rank of a process among those that train one model.

    Attributes:
        rank: its number, from 0.
        count: number of ranks.
        here: number of ranks on this host.
    """

    rank: int
    count: int
    here: int


def has_process_group() -> bool:
    """Whether `torch.distributed` is initialised."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def find_ranks() -> Ranks:
    """The ranks according to `torch.distributed` if initialised, else to torchrun's variables; else a single rank.

    Raises `InputError` for variables that are not numbers, or contradict each other.
    """
    if has_process_group():
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        rank, count = environment_number("RANK", 0), environment_number("WORLD_SIZE", 1)
    here = environment_number("LOCAL_WORLD_SIZE", count)
    if not 0 <= rank < count or not 1 <= here <= count:
        raise launch_environment(
            f"rank {rank} of {count}, {here} on this host: RANK, WORLD_SIZE and LOCAL_WORLD_SIZE contradict each "
            "other. Start the job with torchrun, or correct them"
        )
    return Ranks(rank, count, here)


@dataclass(frozen=True)
class LocalRanks:
    """The ranks of a job that share the memory of this host.

    Attributes:
        rank: the number of this process among them, from 0.
        count: their number.
        hosts: the number of hosts, as far as it is known: 1 if the launcher has set `rank` and `count`.
    """

    rank: int
    count: int
    hosts: int = 1


def local_ranks() -> LocalRanks:
    """The ranks of this host, according to the launcher's variables; else the process group exchanges their hosts.

    Without both, all ranks count as ranks of this host. All ranks must make the first call in a process group: raises
    `WaitError` if one does not. Raises `InputError` for variables that are not numbers, or contradict each other.
    """
    for names in _LOCAL:
        if all(map(os.environ.get, names)):
            rank, count = (environment_number(variable, 0) for variable in names)
            if not 0 <= rank < count:
                raise launch_environment(
                    f"{names[0]}={rank} and {names[1]}={count} contradict each other: correct them"
                )
            return LocalRanks(rank, count)
    job = find_ranks()
    if not has_process_group() or job.count == 1:
        return LocalRanks(job.rank, job.count)
    hosts, here = _hosts_of_ranks(), _this_host()
    return LocalRanks(hosts[: job.rank].count(here), hosts.count(here), len(set(hosts)))


_hosts: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


def _hosts_of_ranks() -> list[str]:
    """The host of each rank of the process group, exchanged through its store once."""
    group: Any = torch.distributed.group.WORLD
    if group not in _hosts:
        store, rank = _default_store(), torch.distributed.get_rank()
        keys = [f"stallfree/host/{number}" for number in range(torch.distributed.get_world_size())]
        store.set(keys[rank], _this_host())
        _wait_for(store, keys, "call rank_sampler() and begin the first epoch in all ranks")
        _hosts[group] = [store.get(key).decode() for key in keys]
    return _hosts[group]


def _this_host() -> str:
    """A text that is the same in all processes that share this host's memory, and in no others."""
    memory = Path("/dev/shm")
    with suppress(OSError):  # containers of one host have a /dev/shm each
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {memory.stat().st_dev}"
    return socket.gethostname()


def _default_store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def environment_number(variable: str, default: int) -> int:
    """The integer in an environment variable. Raises `InputError` for other values."""
    value = os.environ.get(variable, "")
    try:
        return int(value) if value else default
    except ValueError as error:
        raise launch_environment(
            f"{variable}={value!r} in the environment: give a whole number, or unset it"
        ) from error


def part_of_host(hosts: Any) -> tuple[int, int]:
    """Return (number of this host, number of hosts): `hosts`, or for None what torchrun says.

    Raises `InputError` unless `hosts` is such a pair.
    """
    if hosts is None:
        return environment_number("GROUP_RANK", 0), environment_number("GROUP_WORLD_SIZE", 1)
    number, count = hosts if isinstance(hosts, (tuple, list)) and len(hosts) == 2 else (0, 0)
    if not (isinstance(number, int) and isinstance(count, int) and 0 <= number < count):
        raise InputError(f"hosts={hosts!r:.80}: give (number of this host, number of hosts), such as (0, 2)")
    return number, count


# -- the part of each rank in one order -------------------------------------------------------------------------------


def check_ranks(ranks: Any) -> None:
    """Raise `InputError` unless `ranks` is None, "auto" or a pair (rank, number of ranks)."""
    if ranks is None or (isinstance(ranks, str) and ranks == "auto"):
        return
    if not isinstance(ranks, (tuple, list)) or len(ranks) != 2:
        raise InputError(f"ranks={ranks!r}: give (rank, number of ranks), 'auto', or None")
    rank, count = parse_whole(ranks[0], "ranks[0]", 0), parse_whole(ranks[1], "ranks[1]", 1)
    if rank >= count:
        raise InputError(f"ranks={ranks!r}: the rank is counted from 0, so give one from 0 to {count - 1}")


def rank_and_count(ranks: tuple[int, int] | str | None) -> tuple[int, int]:
    """The (rank, number of ranks) of a checked argument `ranks`. None means (0, 1)."""
    if ranks is None:
        return 0, 1
    if isinstance(ranks, str):
        job = find_ranks()
        return job.rank, job.count
    return int(ranks[0]), int(ranks[1])


def share(samples: int, count: int, *, drop_last: bool) -> int:
    """The number of `samples` per rank."""
    return samples // count if drop_last else -(-samples // count)


def deal(ids: Ids, rank: int, count: int, *, drop_last: bool) -> Ids:
    """The ids of one rank: every `count`-th one, from number `rank` on, as in torch's `DistributedSampler`.

    All ranks get the same number: the first ids are repeated, or with `drop_last` the last ones omitted.
    """
    if count == 1:
        return ids
    return np.resize(ids, share(len(ids), count, drop_last=drop_last) * count)[rank::count]


# -- one value for all ranks ------------------------------------------------------------------------------------------

_names: Counter[str] = Counter()


def numbered(name: str) -> str:
    """`name` with a per-process call count: the same in all ranks if they make the same calls."""
    _names[name] += 1
    return f"{name}/{_names[name]}"


def agreed(value: int, name: str) -> int:
    """The value of rank 0 for `name`, sent through the store of the default process group.

    Rank 0 does not wait. Use each `name` once per process group; see `numbered`.

    Raises `InputError` without a process group, `WaitError` if rank 0 does not set a value in time.
    """
    if not has_process_group():
        raise seed_agreement(
            "ranks=... was given without seed=..., and there is no process group through which the ranks can use one "
            "seed: give seed=, the same in all ranks, or call torch.distributed.init_process_group() first"
        )
    if torch.distributed.get_world_size() == 1:
        return value
    store, key = _default_store(), f"stallfree/{name}"
    if torch.distributed.get_rank() == 0:
        store.set(key, str(value))
        return value
    _wait_for(store, [key], "make and iterate the loaders with ranks=... in the same order in all ranks, or give seed=")
    return int(store.get(key))


def _wait_for(store: Any, keys: Sequence[str], advice: str) -> None:
    """Wait until other ranks have set `keys`. Raises `WaitError` that names a missing one."""
    end = time.monotonic() + AGREE_SECONDS
    for key in keys:
        while not store.check([key]):  # not `wait`, which Ctrl-C does not interrupt
            if time.monotonic() > end:
                raise WaitError(
                    f"rank {torch.distributed.get_rank()} has waited {AGREE_SECONDS:g} s for another rank to set "
                    f"{key}: {advice}",
                    page="seed-agreement",
                )
            time.sleep(_LOOK_SECONDS)


# -- samples that are the same on all ranks ---------------------------------------------------------------------------


def warn_of_ranks(*, sampler: bool = False, window: bool = False) -> None:
    """Warn if each of several ranks gets all samples from the loader, its `sampler` or the `window` of a host."""
    if not has_process_group() and os.environ.get("WORLD_SIZE", "1") == "1":  # called for each iteration
        return
    job = find_ranks()
    count = job.here if window and job.count > 1 else job.count
    if count <= 1:
        return
    what, cure = "samples", "Give ranks='auto' for a part of them on each rank"
    if window:
        what, cure = "samples of the window", "Give sampler=dataset.rank_sampler() for a part of them on each rank"
    elif sampler:
        cure = (
            "Give torch.utils.data.DistributedSampler in place of the sampler, or leave it out and give ranks='auto', "
            "for a part of them on each rank"
        )
    end = "" if window else "; or add ranks=(0, 1) if each rank is to have all"
    ranks = f"{count} ranks of this host" if window else f"{count} ranks"
    warnings.warn(f"each of the {ranks} gets all {what}. {cure}{end}", StallfreeWarning, stacklevel=users_level())


def check_prepared(*, knows_ranks: bool) -> None:
    """Check a loader passed to `Accelerator.prepare`, which partitions only the samples of torch's loader.

    Raises `InputError` if there are several processes and the loader gives all samples to each.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    count = getattr(state, "_shared_state", {}).get("num_processes", 1)
    if count > 1 and not knows_ranks:
        raise ranks_conflict(
            f"Accelerator.prepare would give each of the {count} processes all samples of a stallfree.DataLoader. Use "
            "stallfree.integrations.accelerate.prepare(accelerator, loader), which deals them out as for torch's loader"
        )


# -- the samples that a node stores -----------------------------------------------------------------------------------


class LocalSampler(DistributedSampler[Any]):
    """Samples of this rank, those that its own node stores first.

    For a data set that is cached over several nodes.

    Every sample comes exactly once per epoch over all ranks, as with torch's `DistributedSampler`, of which this is
    one; stallfree's loader sets the epoch. Almost nothing comes over the network then. The price: a sample is
    always seen by the same node, so batches mix a node's share and not the whole data set. Data that lie sorted in the
    data set are mixed all the same, since ownership is a hash.

    Args:
        dataset: a `CachedDataset` with a `RedisStore`; with another store every node owns all, and this is a
            `DistributedSampler`.
        shuffle: whether (seed, epoch) decides the order.
        seed: of the order, the same in all ranks.
        drop_last: leave out the last samples rather than repeat the first ones if the number of samples is no multiple
            of the number of ranks.
        rank: of this process; None for that of `torch.distributed`, or else of the variables that torchrun sets.
        num_ranks: of the job, likewise.

    Raises `InputError` when the nodes of the store do not have equally many ranks, or for a data set of another kind.

    Example:
        ```python
        cached = sf.CachedDataset(dataset, capacity="8MiB")  # with several nodes: store=sf.RedisStore(...)
        sampler = sf.LocalSampler(cached, rank=0, num_ranks=2)
        loader = sf.DataLoader(cached, batch_size=4, sampler=sampler)
        assert len(loader) == 2
        ```
    """

    def __init__(
        self,
        dataset: CachedDataset[Any],
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        cache = getattr(dataset, "cache", None)
        if cache is None:
            raise cache_required(f"LocalSampler was given {type(dataset).__name__}: give it a CachedDataset")
        ranks = find_ranks()
        seed = parse_whole(seed, "seed")
        number = ranks.rank if rank is None else parse_whole(rank, "rank")
        count = ranks.count if num_ranks is None else parse_whole(num_ranks, "num_ranks", 1)
        if not 0 <= number < count:
            raise launch_environment(f"rank {number} of {count}: give a rank from 0 to {count - 1}")
        super().__init__(dataset, num_replicas=count, rank=number, shuffle=shuffle, seed=seed, drop_last=drop_last)
        servers: Any = dataset.tier
        nodes: int = getattr(servers, "num_nodes", 1)
        if count % nodes:
            raise launch_environment(f"{count} ranks on {nodes} nodes: every node needs as many ranks as any other")
        self._per_node = count // nodes
        self._owner = np.zeros(len(dataset), np.int16)
        if nodes == 1:
            return
        self._owner = servers.owner(np.arange(len(dataset)))
        if number // self._per_node != servers.me:
            raise launch_environment(
                f"rank {number} of {count} should be on node {number // self._per_node} of {nodes} and is on node "
                f"{servers.me}: ranks have to be numbered node by node, as torchrun does"
            )

    def __repr__(self) -> str:
        return (
            f"LocalSampler({len(self._owner)} samples, rank={self.rank}, num_ranks={self.num_replicas}, "
            f"shuffle={self.shuffle})"
        )

    def __iter__(self) -> Iterator[int]:
        shares = local_shares(
            self._owner,
            self.num_replicas // self._per_node,
            self._per_node,
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=self.epoch,
            drop_last=self.drop_last,
        )
        return iter(shares[self.rank].tolist())


def local_shares(
    owner: npt.NDArray[Any], nodes: int, ranks_per_node: int, *, shuffle: bool, seed: int, epoch: int, drop_last: bool
) -> npt.NDArray[Any]:
    """The ids of each rank, int64 of shape (ranks, ids per rank): every sample once, in the order of the epoch's plan.

    A node's ranks get the samples that the node owns, up to an equal number per rank. Surplus samples of a node go to
    nodes with too few, the last ones of the plan first. If the number of samples is not a multiple of the number of
    ranks, the first samples of the plan are repeated, as by torch's `DistributedSampler`, or with `drop_last` the last
    ones are omitted.

    A pure function of its arguments; it does not query residency.

    Args:
        owner: node of each id, from 0.
        nodes: number of nodes.
        ranks_per_node: number of ranks, the same for all nodes. Rank r is on node r // `ranks_per_node`.
        shuffle: whether (seed, epoch) determines the order; else ids ascend.
        seed, epoch: of the plan.
        drop_last: see above.
    """
    ranks = nodes * ranks_per_node
    ids = make_plan(len(owner), shuffle=shuffle, seed=seed, epoch=epoch).ids
    each = share(len(ids), ranks, drop_last=drop_last)
    ids = np.resize(ids, each * ranks)
    node = owner[ids].astype(np.int64)
    quota = each * ranks_per_node
    order = np.argsort(node, kind="stable")
    counts = np.bincount(node, minlength=nodes)
    within = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    surplus = np.sort(order[within >= quota])
    node[surplus] = np.repeat(np.arange(nodes), np.maximum(0, quota - counts))
    order = np.argsort(node, kind="stable")
    shares = ids[order].reshape(nodes, each, ranks_per_node)
    return shares.transpose(0, 2, 1).reshape(ranks, each)
