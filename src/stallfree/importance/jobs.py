"""What ranks of a job agree on, and the importance that several jobs give to the samples of one cache.

All ranks of a job draw a plan from the same losses, masks and residency: collective operations agree on them.

Losses of different models are not comparable. Each job therefore publishes the relative importance of each sample, its
rank among the losses of that job (RIV), and the job's benefit from the cache. The combined value (AIV) is the sum of
benefit times RIV over the jobs that gain enough (Chen et al., "iCACHE", HPCA 2023, section IV-E).

There is no server. A job holds a lock on one byte of a lock file, which the kernel releases when the process dies, and
a file of that number, which it writes under another name and renames. Readers remove the files of dead jobs.
"""

import contextlib
import math
import os
import re
import struct
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stallfree.datasets.ranks import has_process_group, local_ranks
from stallfree.importance.losses import Losses
from stallfree.ipc.locks import FileLock
from stallfree.platform import OPEN

Array = np.ndarray[Any, np.dtype[Any]]

_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def ranks_of_job() -> tuple[int, int]:
    """The rank of this process in `torch.distributed`, and the number of ranks; (0, 1) if that is not initialised."""
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if has_process_group() else (0, 1)


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
    torch.distributed.all_reduce(table, group=_group())
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
    torch.distributed.broadcast(given, src=0, group=_group())
    return int(given.item())


def unite(*masks: Array) -> None:
    """Combine each mask (bool) of all ranks by OR, in place. Every rank must call it at the same time."""
    if ranks_of_job()[1] == 1:
        return
    bits = torch.from_numpy(np.concatenate(masks).astype(np.uint8))
    torch.distributed.all_reduce(bits, op=torch.distributed.ReduceOp.MAX, group=_group())
    for mask, part in zip(masks, bits.split(list(map(len, masks))), strict=True):
        mask[:] = part.numpy()


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
    default: Any = torch.distributed.group.WORLD
    if torch.distributed.get_backend() == "gloo":
        return default
    if default not in _groups:
        _groups[default] = torch.distributed.new_group(backend="gloo")
    return _groups[default]


THRESHOLD = 1.5
"""Minimum benefit with which a job's importance counts, if any job reaches it."""

LOCK_SECONDS = 2.0
"""Lock timeout; after it a job temporarily uses only its own importance."""

_HEADER = struct.Struct("<8sqd")  # magic, number of ids, benefit
_MAGIC = b"sfjobs1\n"
_FILE = re.compile(r"(job|new)-([0-9]{1,3})")


def benefit(step_seconds: float, hit_seconds: float, miss_seconds: float, *, workers: int, batch_size: int) -> float:
    """The predicted ratio of the epoch time without the cache to that with all samples in the cache.

    Samples are fetched and prepared while the device trains, so a batch takes the longer of the two times.

    Args:
        step_seconds: training time of a batch.
        hit_seconds: time of one worker for a sample in the cache, prep included.
        miss_seconds: the same for a sample that is not in the cache, fetch included.
        workers: number of workers. 0 counts as 1: the training process, whose threads fetch during the steps.
        batch_size: samples per batch.
    """
    share = batch_size / max(1, workers)
    return max(step_seconds, share * miss_seconds) / max(step_seconds, share * hit_seconds)


class Jobs:
    """The jobs that use one cache. This process is one of them from its first `publish` on.

    A job has left when it has called `close`, was freed or its process has exited: the next `combined` of any job
    leaves it out of the sum and removes its file. A forked child is not the job: it joins as a new job if it publishes.
    One process may hold several jobs.

    Memory: a file of 4 bytes per id for each job, in the folder of the cache (shared memory, unless the cache is on a
    disk) and in addition to its capacity; twice that while it is rewritten. In the process 4 bytes per id, and 4 more
    per job during the sum. If the file system is full, or all 255 places are taken, one warning is logged, and the
    job uses only its own importance until it can publish again.

    Args:
        folder: of the cache (`SampleCache.path`). The files are in its subfolder `importance`, and are deleted with it.
        num_ids: number of samples of the data set.

    Not used after `close`.
    """

    def __init__(self, folder: str | Path, num_ids: int) -> None:
        self.num_ids = num_ids
        self._file = _JobFile(Path(folder) / "importance")
        self._own: tuple[Array, float] | None = None
        self._apart = False  # the last `publish` failed
        self._warned = False
        self._leave = weakref.finalize(self, self._file.leave)

    def publish(self, importance: Any, benefit: float) -> None:
        """Publish the importance of each sample to this job; replaces the values published before.

        Args:
            importance: a number from 0 to 1 for each id: the rank of its loss.
            benefit: epoch time without the cache divided by that with it.
        """
        values = np.asarray(importance, "<f4")
        self._own = values, benefit
        try:
            self._file.write([_HEADER.pack(_MAGIC, self.num_ids, benefit), values.data])
            self._apart = False
        except OSError as error:  # includes `WaitError`
            self._apart = True
            self._warn(error)

    def combined(self) -> tuple[Array, int]:
        """The value of each sample to the live jobs that have published, and the number of these jobs.

        The sum of benefit times importance, float64 per id, over the jobs with a benefit of at least 1.5; over all, if
        there is none. Zeros if no job has published.
        """
        published = [] if self._own is None else [self._own]
        if not self._apart:
            try:
                published = [job for data in self._file.read_living() if (job := self._parsed(data)) is not None]
            except OSError as error:
                self._warn(error)
        enough = any(benefit >= THRESHOLD for _, benefit in published)
        total = np.zeros(self.num_ids)
        for values, benefit in published:
            if benefit >= THRESHOLD or not enough:
                total += np.multiply(values, benefit, dtype=np.float64)
        return total, len(published)

    def _parsed(self, data: bytes) -> tuple[Array, float] | None:
        """The importance that a job has published, and its benefit; None if the data is incomplete."""
        if len(data) != _HEADER.size + 4 * self.num_ids:
            return None
        magic, num_ids, benefit = _HEADER.unpack_from(data)
        if magic != _MAGIC or num_ids != self.num_ids or not 0 <= benefit < math.inf:
            return None
        return np.frombuffer(data, "<f4", offset=_HEADER.size), benefit

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the jobs of this cache cannot exchange how important samples are ({error}): this one goes by "
                "its own losses alone for now. A larger /dev/shm helps if it is full",
                RuntimeWarning,
                stacklevel=3,
            )

    def close(self) -> None:
        """Leave: this job no longer counts. Idempotent, and called automatically when this object is freed."""
        self._leave()


class _JobFile:
    """The number of one process among the jobs in `folder`, and its file. Created on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: FileLock | None = None
        self._number = 0
        self._pid = -1  # the process that holds the number

    def write(self, parts: list[Any]) -> None:
        """Write `parts` as this job's file. Raises `OSError`; there is no file then."""
        try:
            with self._held() as lock:
                if self._pid != os.getpid():
                    self._number, self._pid = lock.claim_any(), os.getpid()
                    _remove(self._folder, self._number)  # the file of a dead job
            new = self._folder / f"new-{self._number}"
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | OPEN, 0o600), "wb") as file:
                file.writelines(parts)
            os.replace(new, self._folder / f"job-{self._number}")
        except OSError:
            self._remove_own()
            raise

    def read_living(self) -> list[bytes]:
        """The files of live jobs. Removes those of dead jobs."""
        found: list[bytes] = []
        with self._held() as lock:
            for match in filter(None, map(_FILE.fullmatch, sorted(os.listdir(self._folder)))):
                number = int(match[2])
                if lock.claim(number):  # no job holds it
                    _remove(self._folder, number)
                    lock.release(number)
                elif match[1] == "job":
                    with contextlib.suppress(FileNotFoundError):  # the job is leaving
                        found.append((self._folder / match[0]).read_bytes())
        return found

    @contextlib.contextmanager
    def _held(self) -> Iterator[FileLock]:
        """Hold the lock that guards claiming and reading places. Raises `WaitError`."""
        if self._lock is None:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = FileLock(self._folder / "lock")
        with self._lock.hold(LOCK_SECONDS, "the jobs of a cache"):
            yield self._lock

    def _remove_own(self) -> None:
        if self._pid == os.getpid():
            _remove(self._folder, self._number)

    def leave(self) -> None:
        """Release the place. In a forked child, which has none, the parent's place stays."""
        self._remove_own()
        if self._lock is not None:
            self._lock.close()


def _remove(folder: Path, number: int) -> None:
    for kind in ("job", "new"):
        with contextlib.suppress(OSError):
            (folder / f"{kind}-{number}").unlink()
