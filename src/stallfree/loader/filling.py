"""The samples of one batch: what is missing comes from the source and goes into the cache, then all are prepared."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from stallfree.cache import MISS, SampleCache
from stallfree.cache.records import Borrowed
from stallfree.errors import CodecError, SampleError
from stallfree.loader.rows import Rows
from stallfree.pipeline.compose import Compose, as_call
from stallfree.pipeline.in_place import offer
from stallfree.pipeline.protocol import sample_error
from stallfree.pipeline.watch import Watch
from stallfree.sources.throttle import payload_bytes
from stallfree.stores.partitioning import mixed

if TYPE_CHECKING:
    from stallfree.loader.reader import Reader

_FORMS = 0x666F726D
_UNCHANGING = frozenset({bytes, str, int, float, bool, complex, type(None)})


class Reclassified(Exception):
    """A step that was cached is random: what is under way has to be made again without its output."""


@dataclass
class Samples:
    """The samples of a batch, and what they cost.

    `ids` are those really served: samples left out because of an error are in `skipped`.
    """

    ids: list[int]
    values: list[Any]
    hits: int = 0
    misses: int = 0
    storage_bytes: int = 0
    fetch_seconds: float = 0.0
    skipped: list[SampleError] = field(default_factory=list)


@dataclass
class Filling:
    """Getting what is missing in one batch from the source, and into the cache."""

    reader: Reader
    ids: list[int]
    found: list[Any]
    fetches: dict[int, Future[Any]]
    samples: Samples
    skip: bool
    reads: int = 0
    read_bytes: int = 0
    failed: dict[int, SampleError] = field(default_factory=dict)
    watch: Watch | None = None
    drew: bool = False

    def run(self, missing: list[int], seed: int, epochs: Sequence[int]) -> None:
        """Fill in `found` at the positions `missing`; what cannot be had stays `MISS`."""
        reader = self.reader
        at_first: dict[int, int] = {}
        for at in missing:
            at_first.setdefault(self.ids[at], at)
        if reader.threads and len(at_first) > 1:
            reader.submit(list(at_first), self.fetches)  # those that were resident at the start and no longer are
        failed: Exception | None = None
        try:
            with reader.watch() if reader.caches else contextlib.nullcontext() as self.watch:
                try:
                    self._attempt_all(at_first, seed, epochs)
                except Reclassified:
                    raise
                except Exception as error:
                    failed = error
                self._find_draw(list(at_first))
                if self.watch is not None and at_first and failed is None:
                    reader.find_made(list(at_first))
        except Reclassified:  # what was made may not be stored
            if reader.cache is not None and self.reads:
                reader.cache.count_fetch(self.reads, self.read_bytes)
            raise
        self._store(at_first)
        if failed is not None:
            raise failed
        for at in missing:
            first = at_first[self.ids[at]]
            if at != first:
                self._repeat(at, first)

    def _attempt_all(self, at_first: dict[int, int], seed: int, epochs: Sequence[int]) -> None:
        for id, at in at_first.items():
            if self.reader.drawn:
                self.reader.randomness.seed(seed, epochs[at], id)
            self._attempt(id, at)
            if self.reader.looks_at_each:
                self._find_draw([id])

    def _attempt(self, id: int, at: int) -> None:
        try:
            self.found[at] = self._value(id)
        except SampleError as error:
            if not self.skip:
                raise
            self.failed[id] = error
            self.samples.skipped.append(error)

    def _find_draw(self, ids: list[int]) -> None:
        """If something drew random numbers since the last call, have the reader find out what."""
        if self.watch is not None and ids and (self.watch.moved() or self.drew):
            self.drew = False
            self.reader.find_draw(ids)

    def _value(self, id: int) -> Any:
        reader = self.reader
        record = self._fetch(id, self.fetches.pop(id, None))
        if self.watch is not None and not reader.watches_source:
            self.watch.moved()
        size = payload_bytes(record)
        self.reads += 1
        self.read_bytes += size
        self.samples.storage_bytes += size
        if reader.cache is not None:
            record = private(record)  # the source may keep what it gave
        if len(reader.deterministic) and (reader.share == 1 or is_prepared([id], reader.share)[0]):
            try:
                record = self._apply_each(record) if any(reader.marked) else reader.deterministic(record)
            except Exception as error:
                raise_from(sample_error(error, reader.source, id, "preparing"), error)
        return as_cached(record) if reader.caches else record

    def _apply_each(self, value: Any) -> Any:
        """Apply the deterministic steps; but do not look at what those draw that may draw."""
        for step, marked in zip(self.reader.deterministic, self.reader.marked, strict=True):
            if marked and self.watch is not None:
                self.drew |= self.watch.moved()
            value = as_call(step)(value)
            if marked and self.watch is not None:
                self.watch.moved()
        return value

    def _fetch(self, id: int, future: Future[Any] | None) -> Any:
        source, started = self.reader.source, time.perf_counter()
        try:
            if future is not None:
                with contextlib.suppress(CancelledError):  # by another loader of this process, which ended
                    return future.result()
            return source.fetch(id)
        except Exception as error:
            raise_from(sample_error(error, source, id, "fetching"), error)
        finally:
            if self.reader.threads:
                self.samples.fetch_seconds += time.perf_counter() - started

    def _repeat(self, at: int, first: int) -> None:
        """An id that is twice in a batch: the second sample is its own, not the first one again."""
        if self.found[first] is MISS:
            self.samples.skipped.append(self.failed[self.ids[at]])
        else:
            self.found[at] = private(self.found[first])

    def _store(self, at_first: dict[int, int]) -> None:
        reader, cache = self.reader, self.reader.cache
        if cache is None:
            return
        if self.reads:
            cache.count_fetch(self.reads, self.read_bytes)
        new = [(id, self.found[at]) for id, at in at_first.items() if self.found[at] is not MISS]
        try:
            reader.store([id for id, _ in new], [value for _, value in new])
        except CodecError:
            for id, value in new:
                try:
                    reader.store([id], [value])
                except CodecError as error:
                    raise sample_error(error, reader.source, id, "storing") from error


@dataclass
class InPlace:
    """Preparing the samples of a batch in its rows, out of the cache where they lie: no copies, no fresh memory.

    Attributes:
        found: what to prepare, `MISS` for what cannot be had.
        borrowed: where what is not `ours` came from.
        ours: positions of what belongs to this batch alone.
    """

    reader: Reader
    ids: list[int]
    found: list[Any]
    rows: Rows
    borrowed: Borrowed | None
    ours: set[int]
    samples: Samples
    skip: bool

    def run(self, seed: int, epochs: Sequence[int]) -> None:
        """Prepare all; those that were changed by others meanwhile come from the source."""
        for at, (epoch, rest) in enumerate(zip(epochs, self.reader.rests(self.ids), strict=True)):
            if not self._prepare(at, seed, epoch, rest):
                self._fetch(at, seed, epochs)
                self._prepare(at, seed, epoch, rest)
        if not self.rows.whole:
            self.samples.values[:0] = self.rows.copied()

    def _prepare(self, at: int, seed: int, epoch: int, rest: Compose) -> bool:
        """Whether nobody changed the value meanwhile; then the sample is among the others, or left out."""
        value, id, problem = self.found[at], self.ids[at], None
        if value is MISS:
            return True
        try:
            self.reader.reseed(seed, epoch, id)
            self.rows.offer()
            sample = rest(value)
            written = self.rows.put(sample)
            if not written:
                self.samples.values.append(private(sample))
        except Exception as error:
            problem = error
        finally:
            offer(())
        if self.borrowed is not None and at not in self.ours and not self.borrowed.unchanged(at):
            if problem is None and not written:
                self.samples.values.pop()
            return False
        if problem is not None:
            self.reader.leave_out(self.samples, id, problem, self.skip)
            return True
        if written:
            self.rows.next()
        self.samples.ids.append(id)
        return True

    def _fetch(self, at: int, seed: int, epochs: Sequence[int]) -> None:
        assert isinstance(self.reader.cache, SampleCache)
        self.reader.cache.count_changed(1)
        self.found[at] = MISS
        self.ours.add(at)
        self.samples.hits -= 1
        self.samples.misses += 1
        Filling(self.reader, self.ids, self.found, {}, self.samples, self.skip).run([at], seed, epochs)


def is_prepared(ids: Sequence[int] | npt.NDArray[np.int64], share: float) -> npt.NDArray[Any]:
    """Which of `ids` are cached prepared, where a `share` of the samples is: a function of the id alone."""
    below: npt.NDArray[Any] = mixed(np.asarray(ids, np.uint64), _FORMS) < np.uint64(min(share * 2.0**64, 2**64 - 1))
    return below


def private(value: Any) -> Any:
    """A copy of `value` that shares no memory with it; `value` itself where it cannot change or cannot be copied."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is tuple:
        return tuple([private(item) for item in value])
    if kind is list:
        return [private(item) for item in value]
    if kind is dict:
        return {key: private(item) for key, item in value.items()}
    if kind is torch.Tensor:  # deepcopy would copy all that a view is a part of
        return value.detach().clone().requires_grad_(value.requires_grad)
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock, an open file, a handle of a C library
        return value


def as_cached(value: Any) -> Any:
    """`value` with the strides that a cache gives it: what a step draws for a tensor may follow its strides."""
    kind = type(value)
    if kind is torch.Tensor:
        plain = value.layout is torch.strided and not value.is_nested
        return value.contiguous() if plain and not value.is_contiguous() else value
    if kind is np.ndarray:
        return value if value.flags.c_contiguous else np.ascontiguousarray(value)
    if kind is tuple or kind is list:
        return kind([as_cached(item) for item in value])
    if kind is dict:
        return {key: as_cached(item) for key, item in value.items()}
    return value


def raise_from(problem: SampleError, error: BaseException) -> NoReturn:
    """Raise `problem`, caused by `error`; a `SampleError` that came up as such keeps its own cause."""
    if problem is error:
        raise problem
    raise problem from error
