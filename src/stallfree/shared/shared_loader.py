"""`SharedLoader`: jobs on one host that train on the same data share its preparation."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing.context import BaseContext
from typing import Any, Generic, Self

from torch.utils.data import default_collate

from stallfree.datasets.epoch_source import SourceSetup
from stallfree.datasets.ranks import find_ranks, job_name
from stallfree.datasets.reader import reader_of
from stallfree.datasets.smart_cache import SmartCacheDataset
from stallfree.errors import (
    InputError,
    argument_conflict,
    group_mismatch,
    object_closed,
    seed_agreement,
    state_format,
    state_mismatch,
)
from stallfree.ipc.process import context_of, start_method
from stallfree.loader.arguments import WAIT_SECONDS, check_functions, check_numbers, check_remote, seed_of
from stallfree.loader.order import Order
from stallfree.loader.pool import Options
from stallfree.loader.shown import shown_by
from stallfree.pipeline.fingerprint import fingerprint, tolerant
from stallfree.pipeline.randomness import draw_seed
from stallfree.platform import need_linux
from stallfree.ray.ray_workers import GroupTerms, RayWorkers
from stallfree.shared.epoch_iterator import EpochIterator, JobContext
from stallfree.shared.group import Group, Terms
from stallfree.shared.member import Member
from stallfree.shared.preparation import Setup
from stallfree.shared.protocol import NEWCOMER, Hello
from stallfree.shared.rebatching import rebatching_of
from stallfree.stats import SharedStats
from stallfree.typevars import BatchT_co
from stallfree.units import parse_size

_STATE_VERSION = 1

_made = count()
_SUMMED = (
    *("hits", "misses", "storage_bytes", "fetch_seconds", "prep_seconds"),
    *("wait_seconds", "retries", "workers_replaced", "skips", "private_copies"),
)
"""Counts that include the chunks prepared locally."""


class SharedLoader(Generic[BatchT_co]):
    """A loader whose batches are prepared once for all jobs of a `group`.

    The jobs run on one host and give the same `group`.

    Used in each job like a `DataLoader`. The first job starts a coordinator process, which runs the workers and holds
    the ring of ready batches; the other jobs find it by the group's name. Each job gets every sample exactly once per
    epoch, with that epoch's augmentation, and all jobs get the same batches. This is the coordinated prep of CoorDL
    (Mohan et al., VLDB 2021, section 4.3), with leases instead of hand-out counts, and with failure handling.

    Jobs may join, leave and die at any time. When the coordinator ends with the job that started it, or dies, the next
    job that notices starts another. A batch is a function of (seed, epoch, ids), so none is lost or repeated. A job is
    in the group from its first iteration until `close`, or until the loader is freed. Close the loader if the process
    continues after training; otherwise the other jobs wait for it. Used as a context manager, the loader is closed even
    if the frame of a failed or pruned trial is kept alive, as Optuna does.

    A job's changes to the tensors of its batch are invisible to other jobs. A copy of the loader, also in another
    process, is another job of the group. If a job begins an iteration before the last one has ended, it prepares the
    rest of that one with its own `num_workers`.

    Args:
        dataset: a `CachedDataset`, a source, or any map-style data set, the same in all jobs.
        group: name of the group: letters, digits, `.`, `_` and `-`.
        batch_size: samples per batch of this job (of each rank, if the job has several). It may differ between jobs: a
            multiple or a divisor of `chunk_size`.
        shuffle: shuffle in each epoch; the order is a function of (seed, epoch).
        num_workers: worker processes of the group, 1 or more. The first job decides.
        chunk_size: samples prepared as one batch, then split or joined for each job. None: the group's; in its first
            job, `batch_size` times the number of ranks.
        collate_fn: makes a batch of a list of samples; torch's default if None. Any other one requires that all jobs
            have batches of `chunk_size`, and no ranks.
        drop_last: drop an incomplete last batch; decided by each job.
        pin_memory: yield batches in pinned memory, if there is an accelerator.
        timeout: seconds to wait for a batch before `WaitError`; 0 means 300. With `on_lag="wait"` a slow job may hold
            up the others for half of that.
        worker_init_fn: called in each worker with its number.
        multiprocessing_context: "fork", "forkserver", "spawn" or a context; Python's default if None.
        prefetch_factor: batches in flight per worker; 2 if None. The first job decides.
        seed: seed of order and augmentation. If None, that of the `CachedDataset`, or that of the group: the first job
            that iterates draws one from torch's generator.
        with_ids: yield `Batch(data, ids, weights)`.
        on_error: "raise" the error of a sample that cannot be read in every job, or "skip" the sample. If all of
            a rank's samples of a batch are skipped, that rank has one batch less than the others.
        staging: bytes for the ring of ready batches, as an int or a string such as "256MiB". None: twice `num_workers`
            batches, and four for each job in the group. The first job decides.
        join: a job that joins in the middle of an epoch waits for the "next" one, or does a "catchup": it gets the
            remaining batches of this epoch with the others, then prepares the missed ones with its own `num_workers`.
        on_lag: a slow job holds up the others when the ring is full of batches that it has not taken. "wait" for it, or
            "detach" it: it prepares the rest of its epoch locally, and rejoins the others in the next one.
        job_transform: applied in this process to each batch of this job, after the shared prep. Its random draws are a
            function of (seed, epoch, number of the batch).
        workers: `RayWorkers` prepare the batches on a Ray cluster, once for all hosts with the same `group` and
            cluster. Each host fetches them once. `num_workers` local workers continue if no Ray worker is left.
            Requires a seed, the same on all hosts.

    Attributes:
        group: the group's name.
        chunk_size: the group's chunk size.

    The ranks of a job come from `torch.distributed` if it is initialised, else from the variables `RANK` and
    `WORLD_SIZE`. Each rank gets its rows of every `batch_size` times `WORLD_SIZE` samples, and all ranks get the same
    number of batches.

    Raises `InputError` for invalid arguments, and for a job whose data set, transform, seed or batches differ from the
    group's. Iteration raises the errors of the user's code, `WorkerError` and `WaitError`.

    Example:
        ```python
        with sf.SharedLoader(dataset, group="search-7", batch_size=4, shuffle=True) as loader:
            for images, labels in loader:  # the same lines in each job
                train(images, labels)
        ```
    """

    def __init__(
        self,
        dataset: Any,
        *,
        group: str,
        batch_size: int = 1,
        shuffle: bool = False,
        num_workers: int = 1,
        chunk_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        prefetch_factor: int | None = None,
        seed: int | None = None,
        with_ids: bool = False,
        on_error: str = "raise",
        staging: int | str | None = None,
        join: str = "next",
        on_lag: str = "wait",
        job_transform: Callable[[Any], Any] | None = None,
        workers: RayWorkers | None = None,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        need_linux("SharedLoader", "use DataLoader, one in each job")
        check_numbers(num_workers, batch_size, timeout, prefetch_factor, False)
        check_functions(collate_fn, worker_init_fn, on_error)
        check_remote(workers, None)
        _check(dataset, num_workers, batch_size, chunk_size, join, on_lag, job_transform)
        self.dataset, self.group = dataset, group
        self.batch_size, self.drop_last, self.with_ids = batch_size, drop_last, with_ids
        self.seed = self._given = seed_of(dataset, seed, None)
        _check_workers(workers, self.seed)
        self._shuffle, self._ranks, self._joined = bool(shuffle), find_ranks(), False
        options = Options(
            reader=reader_of(dataset),
            dataset=dataset,
            collate=None if collate_fn is default_collate else collate_fn,
            single=False,
            seed=self.seed or 0,
            skip=on_error == "skip",
            workers=num_workers,
            ahead=(prefetch_factor or 2) * num_workers,
            context=context_of(multiprocessing_context),
            worker_init=worker_init_fn,
            seconds=timeout or WAIT_SECONDS,
            staging=None if staging is None else parse_size(staging, "staging"),
            log=None,
            remote=workers,
        )
        self._samples = len(options.reader.source)
        self._group = self._join(options, chunk_size, on_error, on_lag)
        self._context = self._make_context(options, on_lag == "detach", join == "catchup")
        self._context.transform, self._context.pin = job_transform, pin_memory
        self._resumed: int | None = None
        self._done: frozenset[int] = frozenset()
        self._passes: weakref.WeakSet[EpochIterator] = weakref.WeakSet()
        self._pass: weakref.ref[EpochIterator] | None = None  # the one begun last
        self._end = weakref.finalize(self, _close, os.getpid(), self._context.member, self._group)

    def _join(self, options: Options, chunk_size: int | None, on_error: str, on_lag: str) -> Group:
        with tolerant():  # the group is identified by name: objects without a fingerprint are assumed to be equal
            same = {
                "data set": fingerprint(options.reader.source.fingerprint()),
                "transform": fingerprint(_steps(self.dataset)),
                "collate_fn": fingerprint(options.collate),
                "seed": self._given,
                "shuffle": self._shuffle,
                "on_error": on_error,
                "on_lag": on_lag,
            }
        chunk = chunk_size or self.batch_size * self._ranks.count
        joined = Group(self.group, Terms(same, chunk, options.workers, options.ahead, options.staging))
        try:
            self.chunk_size = joined.terms.chunk
            joined.check_sizes(chunk_size, self.batch_size, self._ranks.count, options.collate is not None)
            if self.seed is not None:
                self._agree_on_seed(joined, self.seed)
        except BaseException:
            joined.close()
            raise
        return joined

    def _make_context(self, options: Options, detach: bool, catchup: bool) -> JobContext:
        terms, ranks = self._group.terms, self._ranks
        shared = replace(options, workers=terms.workers, ahead=terms.ahead, staging=terms.staging)
        if options.remote is not None:
            same = {**terms.same, "seed": self.seed, "chunk_size": terms.chunk}
            shared = replace(shared, group=GroupTerms(self.group, {name: str(value) for name, value in same.items()}))
        options = replace(options, staging=None, remote=None)  # of what this job prepares itself
        setup = Setup(
            folder=self._group.folder,
            options=shared,
            base_seed=0,
            order=Order(SourceSetup(self._samples, self.chunk_size, self._shuffle, seed=self.seed)),
            detach=detach,
            lag_seconds=options.seconds / 2,  # less than the other jobs wait
        )
        job = f"{os.getpid()}-{next(_made)}" if ranks.count == 1 else job_name() or f"child of {os.getppid()}"
        script = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
        member = Member(self._group, setup, Hello(job, ranks.here, catchup, script or "python"), options.seconds)
        sizes = self._samples, self.chunk_size, self.batch_size, ranks, self.drop_last
        rebatching = partial(rebatching_of, setup.order, *sizes)
        return JobContext(member, rebatching, options, self.with_ids)

    # -- epochs -------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The group's epoch in the active pass, or in the next one.

        It may rise by more than one, if the group was further on.
        """
        active = self._active_pass
        return self._context.next_epoch if active is None else active.epoch

    @property
    def _active_pass(self) -> EpochIterator | None:
        iteration = None if self._pass is None else self._pass()
        return None if iteration is None or iteration.ended else iteration

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return len(self._context.rebatching(0))

    def __iter__(self) -> Iterator[BatchT_co]:
        if not self._end.alive:
            raise object_closed(f"the loader of the group {self.group!r} is closed: make a new one")
        start_method(self._context.options.context)  # a script without a main guard would wait for itself
        active = self._active_pass
        if active is not None:
            active.continue_alone()
        cache = self._context.options.reader.cache
        if cache is not None and cache.tier is not None:
            cache.tier.begin_epoch()
        drawn = draw_seed()
        if self._shuffle:
            draw_seed()  # torch's RandomSampler draws a second seed
        done = self._done
        if not self._joined:
            self._context.member.setup.base_seed = drawn
            if self.seed is None:
                self._set_seed(self._group.agree_on_seed(drawn))
            self._context.next_epoch = self._context.member.join(self._first_needed(done))
            self._joined = True
        self._done = frozenset()
        iteration = EpochIterator(self, self._context, self._context.next_epoch, done)
        self._passes.add(iteration)
        self._pass = weakref.ref(iteration)
        return iteration

    def _agree_on_seed(self, group: Group, seed: int) -> None:
        """Raise `InputError` if the group's seed differs from `seed`."""
        agreed = group.agree_on_seed(seed)
        if agreed != seed:
            raise group_mismatch(
                f"this job does not fit into the group {self.group!r}: it has seed={agreed}, this job gives "
                f"seed={seed}. Give the same, or the name of another group"
            )

    def _set_seed(self, seed: int) -> None:
        setup = self._context.member.setup
        self.seed = setup.order.seed = seed
        setup.options = replace(setup.options, seed=seed)
        self._context.options = replace(self._context.options, seed=seed)

    def _first_needed(self, done: frozenset[int]) -> int:
        """Return the number of the first chunk needed if the batches `done` are not, or `NEWCOMER`."""
        if self._resumed is None:
            return NEWCOMER
        order = self._context.member.setup.order
        return self._resumed * len(order) + self._context.rebatching(0).first_chunk(done)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the job's position: the group's epoch and the batches already yielded.

        It is serializable as JSON.
        """
        active = self._active_pass
        done = self._done if active is None else active.done
        return {"version": _STATE_VERSION, "epoch": self.epoch, "done": _ranges(done), "terms": self._terms()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state that `state_dict` returned; call it before the first iteration.

        A new group starts there. If the group is further on, this job prepares the missed part of that epoch locally.
        Raises `InputError` for a state of another loader, and after the first iteration.
        """
        if self._joined:
            raise state_mismatch("this loader is in its group already: load the state before the first iteration")
        known = isinstance(state, dict) and {"version", "epoch", "done", "terms"} <= state.keys()
        if not known or state["version"] != _STATE_VERSION:
            raise state_format("this is no state of a SharedLoader of this release: give what state_dict() returned")
        seed, mine = state["terms"].get("seed"), self._terms()
        if None in (seed, self.seed):
            mine["seed"] = seed
        if state["terms"] != mine:
            raise state_mismatch(f"the state was taken with {state['terms']}, this loader has {mine}: give the same")
        if self.seed is None and seed is not None:
            self._agree_on_seed(self._group, seed)
            self._set_seed(seed)
        self._context.next_epoch = self._resumed = int(state["epoch"])
        self._done = frozenset(number for start, stop in state["done"] for number in range(start, stop))

    def _terms(self) -> dict[str, Any]:
        """Return the settings that must be equal for a position to mean the same in two loaders."""
        same = {"seed": self.seed, "shuffle": self._shuffle}
        sizes = {"samples": self._samples, "batch_size": self.batch_size, "chunk_size": self.chunk_size}
        return {**same, **sizes, "ranks": self._ranks.count, "drop_last": self.drop_last}

    # -- the rest -----------------------------------------------------------------------------------------------------

    def stats(self) -> SharedStats:
        """Return the statistics of this job's loader since its creation."""
        context = self._context
        counts = dict(context.counts)
        for name in _SUMMED:
            counts[name] += context.local_counts[name]
        counts |= {"num_workers": self._group.terms.workers, "staging_bytes": context.member.staging_bytes}
        return SharedStats(**counts, alone=context.local, takeovers=context.member.deaths, jobs=context.member.jobs)

    def close(self) -> None:
        """Leave the group; batches that are still held stay valid. Idempotent.

        The last job ends its processes.
        """
        for iteration in list(self._passes):
            iteration.close()
        self._end()

    def __reduce__(self) -> Any:
        state = None if self._joined or self._resumed is None else self.state_dict()
        return _another_job, (type(self), self._arguments), state

    __setstate__ = load_state_dict

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    __repr__ = shown_by("group", "batch_size", "chunk_size", "drop_last")


def _another_job(kind: type[SharedLoader[Any]], arguments: dict[str, Any]) -> SharedLoader[Any]:
    return kind(**arguments)


def _check(
    dataset: Any, num_workers: int, batch_size: Any, chunk_size: Any, join: str, on_lag: str, job_transform: Any
) -> None:
    if num_workers < 1:
        raise InputError("num_workers=0: the workers belong to the group, which needs 1 or more")
    if batch_size is None:
        raise InputError("batch_size=None: give the number of samples per batch")
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise InputError(f"chunk_size={chunk_size!r}: give an int of 1 or more, or None")
    if join not in ("next", "catchup"):
        raise InputError(f"join={join!r}: use 'next' or 'catchup'")
    if on_lag not in ("wait", "detach"):
        raise InputError(f"on_lag={on_lag!r}: use 'wait' or 'detach'")
    if job_transform is not None and not callable(job_transform):
        raise InputError(f"job_transform={job_transform!r} cannot be called: give a function, or None")
    if isinstance(dataset, SmartCacheDataset):
        raise argument_conflict(
            "a SmartCacheDataset is a window of one job over the data: give the data set that it wraps, or a "
            "CachedDataset of that"
        )


def _check_workers(workers: RayWorkers | None, seed: int | None) -> None:
    if workers is not None and seed is None:
        raise seed_agreement("a SharedLoader with RayWorkers has no seed: give seed=..., the same on all hosts")
    if workers is not None and workers.num_workers == "auto":
        raise argument_conflict(
            "num_workers='auto' of RayWorkers measures one training loop: give a SharedLoader a number"
        )


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return the numbers as a list of [start, stop] ranges."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return ranges


def _steps(dataset: Any) -> Any:
    steps = getattr(dataset, "steps", None)
    return steps if steps is not None else reader_of(dataset).source.pipeline


def _close(pid: int, member: Member, group: Group) -> None:
    if pid != os.getpid():  # a forked child
        return
    try:
        member.close()
    finally:
        group.close()
