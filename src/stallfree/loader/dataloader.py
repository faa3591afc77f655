"""`DataLoader`: takes what `torch.utils.data.DataLoader` takes, yields what it yields, without its stalls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

from stallfree.errors import InputError
from stallfree.loader.cached_dataset import CachedDataset
from stallfree.loader.epoch import Crew, Epoch
from stallfree.loader.reader import Reader
from stallfree.pipeline.compose import Compose
from stallfree.plans import make_plan
from stallfree.sources import as_source
from stallfree.stats import LoaderStats
from stallfree.units import parse_size

WAIT_SECONDS = 300.0
"""Longest wait for a batch unless `timeout` says otherwise."""

_STATE_VERSION = 1

log = logging.getLogger("stallfree")


class Batch(NamedTuple):
    """What a loader with `with_ids=True` yields.

    Attributes:
        data: the batch as it would be without ids.
        ids: int64 tensor, the samples really in it, in order.
        weights: float32 tensor of the same length, or None where all are 1.
    """

    data: Any
    ids: torch.Tensor
    weights: torch.Tensor | None


class DataLoader:
    """Batches of a map-style data set, prepared ahead by worker processes into standing shared memory.

    The arguments of `torch.utils.data.DataLoader` mean what they mean there; differences and additions:

    Args:
        dataset: a `CachedDataset`, a source, or any map-style data set.
        batch_size: samples per batch; None: samples one by one, not collated.
        shuffle: another order each epoch, a function of (seed, epoch).
        sampler: gives ids (integers).
        batch_sampler: gives lists of ids.
        num_workers: worker processes; 0: the training process itself.
        collate_fn: makes a batch of a list of samples; torch's default if None.
        pin_memory: yield batches in pinned memory, when there is an accelerator.
        drop_last: leave out a last batch that is not full.
        timeout: seconds to wait for a batch before `WaitError`; 0 means 300.
        worker_init_fn: called in each worker with its number.
        multiprocessing_context: "fork", "forkserver", "spawn" or a context; Python's default if None.
        generator: its `initial_seed()` is the seed.
        prefetch_factor: batches under way per worker; 2 if None.
        persistent_workers: keep the workers from epoch to epoch.
        seed: of order and augmentation; that of the `CachedDataset`, or 0, if None.
        with_ids: yield `Batch(data, ids, weights)`.
        on_error: "raise" a `SampleError` for a sample that cannot be had, or "skip" it: it is left out, counted, and the
            first ones are reported in the log.
        staging: bytes for the ring of ready batches, as an int or such as "256MiB". None: as many batches as are under way,
            and three that may be kept. A batch that does not fit is handed over as a copy.

    A batch is memory of its own for as long as one of its tensors is alive: kept batches are never overwritten. Raises
    `InputError` for arguments that cannot be used; while iterating `SampleError`, `WorkerError` and `WaitError`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        seed: int | None = None,
        with_ids: bool = False,
        on_error: str = "raise",
        staging: int | str | None = None,
    ) -> None:
        _check_numbers(num_workers, batch_size, timeout, prefetch_factor, persistent_workers, on_error)
        _check_sampling(batch_size, shuffle, sampler, batch_sampler, drop_last)
        self.dataset = dataset
        self.batch_size = batch_size if batch_sampler is None else None
        self.shuffle = bool(shuffle)
        self.sampler = sampler
        self.batch_sampler = batch_sampler
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.pin_memory = pin_memory
        self.drop_last = drop_last
        self.with_ids = with_ids
        self.persistent_workers = persistent_workers
        self._reader = _reader_of(dataset)
        if seed is None:
            seed = int(getattr(dataset, "seed", 0)) if generator is None else generator.initial_seed()
        self.seed = seed
        single = batch_size is None and batch_sampler is None
        self._crew_options: dict[str, Any] = {
            "reader": self._reader,
            "dataset": dataset,
            "collate": _collate_of(collate_fn, single),
            "seed": seed,
            "skip": on_error == "skip",
            "workers": num_workers,
            "ahead": (2 if prefetch_factor is None else prefetch_factor) * max(1, num_workers),
            "context": multiprocessing_context,
            "worker_init": worker_init_fn,
            "seconds": timeout or WAIT_SECONDS,
            "staging": None if staging is None else parse_size(staging, "staging"),
        }
        self._crew: Crew | None = None
        self._totals = Crew.no_stats()
        self._epoch = 0
        self._resume: dict[str, Any] | None = None
        self._current: Epoch | None = None

    # -- epochs -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        samples = len(self._reader.source) if self.sampler is None else len(self.sampler)  # type: ignore[arg-type]
        if self.batch_size is None:
            return samples
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is epoch `epoch`. Without it, epochs count from 0 by themselves."""
        self._epoch = epoch
        self._resume = None

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        epoch = self._epoch
        skip, batches = 0, None
        if resume is not None:
            skip = resume["batches"]
            if resume["rest"] is not None:
                batches = (np.asarray(ids, np.int64) for ids in resume["rest"])
        if batches is None:
            batches = self._batches(epoch, skip)
        crew = self._crew
        if crew is None or not self.persistent_workers:
            crew = Crew(**self._crew_options)
            if self.persistent_workers:
                self._crew = crew
        self._current = Epoch(crew, batches, epoch, skip)
        return self._run(self._current, crew)

    def _run(self, epoch: Epoch, crew: Crew) -> Iterator[Any]:
        try:
            for data, ids in epoch:
                if self.pin_memory and torch.cuda.is_available():
                    data = _pinned(data)
                yield Batch(data, torch.from_numpy(ids.copy()), None) if self.with_ids else data
            if self._current is epoch:
                self._epoch, self._current = epoch.number + 1, None
        finally:
            epoch.close()
            if crew is not self._crew:
                self._totals = Crew.add_stats(self._totals, crew.stats())
                crew.close()

    def _batches(self, epoch: int, skip: int) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
        if self.batch_sampler is not None:
            batches = map(_as_ids, self.batch_sampler)
        elif self.sampler is not None:
            _tell_epoch(self.sampler, epoch)
            batches = _chunks(iter(self.sampler), self.batch_size or 1, self.drop_last)
        else:
            plan = make_plan(len(self._reader.source), shuffle=self.shuffle, seed=self.seed, epoch=epoch)
            size = self.batch_size or 1
            end = len(plan.ids) // size * size if self.drop_last else len(plan.ids)
            yield from (plan.ids[at : min(at + size, end)] for at in range(skip * size, end, size))
            return
        for number, ids in enumerate(batches):
            if number >= skip:
                yield ids

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where training is: `load_state_dict` in another process goes on with exactly the samples that are left.

        For the loader's own order that is two integers; with a `sampler` or `batch_sampler`, which may be random, the ids
        that are left are in the state. Take it in the process that iterates, between two batches.
        """
        current = self._current
        if current is None:
            resume = self._resume or {"batches": 0, "rest": None}
            return {"version": _STATE_VERSION, "epoch": self._epoch, "seed": self.seed, **resume}
        own = self.sampler is None and self.batch_sampler is None
        return {
            "version": _STATE_VERSION,
            "epoch": current.number,
            "seed": self.seed,
            "batches": current.handed_out,
            "rest": None if own else current.rest(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises `InputError` for a state of another version or seed."""
        if state.get("version") != _STATE_VERSION:
            raise InputError(f"the state has version {state.get('version')!r}, expected {_STATE_VERSION}: it is of another release")
        if state["seed"] != self.seed:
            raise InputError(f"the state was taken with seed={state['seed']}, this loader has seed={self.seed}: give the same")
        self._epoch = state["epoch"]
        self._resume = {"batches": state["batches"], "rest": state["rest"]}
        self._current = None

    def stats(self) -> LoaderStats:
        """What this loader has done since it was made."""
        crews = [crew for crew in (self._crew, self._current and self._current.crew) if crew is not None]
        total = self._totals
        for crew in dict.fromkeys(crews):
            if not crew.closed:
                total = Crew.add_stats(total, crew.stats())
        return total

    def close(self) -> None:
        """End persistent workers. The loader may be iterated again."""
        if self._current is not None:
            self._current.close()
        crew, self._crew = self._crew, None
        if crew is not None:
            self._totals = Crew.add_stats(self._totals, crew.stats())
            crew.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reader_of(dataset: Any) -> Reader:
    if isinstance(dataset, CachedDataset):
        return dataset.reader
    source = as_source(dataset)
    return Reader(source, None, Compose([]), source.pipeline, fresh=True)


def _collate_of(given: Callable[[list[Any]], Any] | None, single: bool) -> Callable[[list[Any]], Any] | None:
    if single:
        return _Single(given or default_convert)
    return None if given is default_collate else given


class _Single:
    """Without batching, `collate_fn` gets the sample."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self.convert = convert

    def __call__(self, samples: list[Any]) -> Any:
        return self.convert(samples[0])


def _pinned(data: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(data)


def _chunks(ids: Iterator[Any], size: int, drop_last: bool) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    chunk: list[Any] = []
    for id in ids:
        chunk.append(id)
        if len(chunk) == size:
            yield _as_ids(chunk)
            chunk = []
    if chunk and not drop_last:
        yield _as_ids(chunk)


def _as_ids(ids: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"the sampler gave {ids!r}: ids of samples must be integers, in a list for each batch")
    return array.astype(np.int64)


def _tell_epoch(sampler: Any, epoch: int) -> None:
    """A `DistributedSampler` shuffles by its epoch, which users forget to set."""
    if isinstance(sampler, torch.utils.data.DistributedSampler):
        sampler.set_epoch(epoch)


def _check_numbers(
    num_workers: int,
    batch_size: int | None,
    timeout: float,
    prefetch_factor: int | None,
    persistent_workers: bool,
    on_error: str,
) -> None:
    if num_workers < 0:
        raise InputError(f"num_workers={num_workers}: give 0 (no worker processes) or more")
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise InputError(f"batch_size={batch_size!r}: give an int of 1 or more, or None for single samples")
    if timeout < 0:
        raise InputError(f"timeout={timeout}: give seconds, or 0 for {WAIT_SECONDS:.0f} s")
    if prefetch_factor is not None and prefetch_factor < 1:
        raise InputError(f"prefetch_factor={prefetch_factor}: give 1 or more")
    if persistent_workers and num_workers == 0:
        raise InputError("persistent_workers=True needs num_workers of 1 or more")
    if on_error not in ("raise", "skip"):
        raise InputError(f"on_error={on_error!r}: use 'raise' or 'skip'")


def _check_sampling(
    batch_size: int | None, shuffle: bool | None, sampler: Any, batch_sampler: Any, drop_last: bool
) -> None:
    if sampler is not None and shuffle:
        raise InputError("shuffle=True and a sampler were given: the sampler decides the order, so leave out shuffle")
    if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
        raise InputError("batch_sampler decides the batches: leave out batch_size, shuffle, sampler and drop_last")
    if batch_size is None and drop_last:
        raise InputError("drop_last=True needs a batch_size")
