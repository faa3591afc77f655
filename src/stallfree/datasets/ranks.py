"""The rank and job of this process, and warnings if all ranks have the same samples."""

import os
import socket
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash

from stallfree.errors import InputError, StallfreeWarning, WaitError, launch_environment, seed_agreement
from stallfree.raising import users_level

_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
"""Environment variables that are equal in all ranks of one job."""

_LOCAL = (("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"))
"""Environment variables of torchrun and Open MPI: number of a rank on its host, and number of ranks there."""

AGREE_SECONDS = 300.0
"""Longest wait for the value of rank 0."""

_LOOK_SECONDS = 0.02

Ids = np.ndarray[Any, np.dtype[np.int64]]


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
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/dev/shm').st_dev}"  # containers of one host have a /dev/shm each
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
    return _pair("hosts", hosts, "(number of this host, number of hosts)")


def _pair(name: str, value: Any, parts: str) -> tuple[int, int]:
    """`value` as two whole numbers, the first below the second. Raises `InputError` for anything else."""
    number, count = value if isinstance(value, (tuple, list)) and len(value) == 2 else (0, 0)
    if not (all(isinstance(part, (int, np.integer)) for part in (number, count)) and 0 <= number < count):
        raise InputError(f"{name}={value!r:.80}: give {parts}, counted from 0, such as (0, 2)")
    return int(number), int(count)


# -- the part of each rank in one order -------------------------------------------------------------------------------


def check_ranks(ranks: Any) -> None:
    """Raise `InputError` unless `ranks` is None, "auto" or a pair (rank, number of ranks)."""
    if ranks is not None and not (isinstance(ranks, str) and ranks == "auto"):
        _pair("ranks", ranks, "'auto' or (rank, number of ranks)")


def rank_and_count(ranks: tuple[int, int] | str | None) -> tuple[int, int]:
    """The (rank, number of ranks) of a checked argument `ranks`. None means (0, 1)."""
    if isinstance(ranks, str):
        job = find_ranks()
        return job.rank, job.count
    return (0, 1) if ranks is None else (int(ranks[0]), int(ranks[1]))


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
    if not has_process_group() and "WORLD_SIZE" not in os.environ:
        return  # soon: this is done for each epoch
    job, or_all = find_ranks(), "; or add ranks=(0, 1) if each rank is to have all"
    count, what, cure = job.count, "ranks gets all samples", "ranks='auto'"
    if window:
        count, or_all = job.here, ""
        what, cure = "ranks of this host gets all samples of the window", "sampler=dataset.rank_sampler()"
    elif sampler:
        cure = "torch.utils.data.DistributedSampler in place of the sampler, or leave it out and give ranks='auto',"
    if count > 1:
        text = f"each of the {count} {what}. Give {cure} for a part of them on each rank{or_all}"
        warnings.warn(text, StallfreeWarning, stacklevel=users_level())
