"""How a loader serves the plans of an `ImportanceSampler`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from multiprocessing.context import BaseContext

import numpy as np
import torch

from stallfree.loader.board import LOW, MISSED, PENDING, Board, Field
from stallfree.loader.crew import Counts
from stallfree.loader.messages import Ids
from stallfree.loader.packager import PACKAGE_BYTES, Packager
from stallfree.loader.reader import Reader
from stallfree.plans import ImportanceSampler
from stallfree.plans.begun import Begun
from stallfree.plans.benefit import benefit
from stallfree.plans.draws import generator
from stallfree.plans.rules import Draw
from stallfree.plans.serving import Serving
from stallfree.stats import ImportanceStats
from stallfree.stores import AnyCache, RedisCache, servers_of

_FIRST_REGION = 0.1
"""Share of the cache for L-samples before there are requests to go by (Chen et al., iCACHE, HPCA 2023, section IV)."""


class Importance:
    """An `ImportanceSampler` in a loader.

    Args:
        sampler: draws.
        reader: of the loader.
        context: of `multiprocessing`; starts the processes that pack and read packages.
        batch_size: samples per batch.
        drop_last: leave out a last batch that is not full.
    """

    def __init__(
        self, sampler: ImportanceSampler, reader: Reader, context: BaseContext, batch_size: int, drop_last: bool
    ) -> None:
        self.sampler = sampler
        self._reader, self._context = reader, context
        self._batch_size, self._drop_last = batch_size, drop_last
        self._packing: _Packing | None = None
        self._packed: dict[str, int] = {}
        self._counts = dict.fromkeys(("high_requests", "high_hits", "low_requests", "low_hits", "swaps"), 0)
        self._counts["substitutions"] = 0
        self._serving: Serving | None = None
        self._low_share = _FIRST_REGION
        self._before: Counts = {}
        self._begun: Begun | None = None
        self._steps = 0

    def steps(self, epoch: int) -> int:
        """Number of batches of an epoch. Draws its plan if need be."""
        if self._begun is not None and self._begun.draw.plan.epoch == epoch:
            return self._steps
        return len(self.sampler.batches(epoch, self._batch_size, drop_last=self._drop_last))

    def begin(self, epoch: int, counts: Counts | None = None) -> Served:
        """Serve an epoch from its start. `counts` are those of the loader so far."""
        self._end_epoch()
        if counts is not None:
            self._measure(counts)
        sampler, cache = self.sampler, self._reader.cache
        begun = sampler.begin(epoch, self._batch_size, drop_last=self._drop_last)
        draw, self._begun, self._steps = begun.draw, begun, len(begun.batches)
        if sampler.cache is None:
            return Served(sampler, begun, begun.batches)
        if sampler.packages is not None and cache is not None and draw.low.any():
            self._packing = self._packing or _Packing(sampler, self._reader, self._context)
            self._packing.begin(draw, begun.batches, self._region(cache))
        packing = self._packing if draw.low.any() else None
        assert sampler.seed is not None  # drawn with the plan
        rng = generator(sampler.seed, epoch, 3)
        servers, residents = servers_of(sampler.cache), sampler.cache
        if servers is not None:
            residents = _Known(servers)
        self._serving = Serving(begun.batches, draw.low, residents, sampler.on_miss, rng, packing, begun.elsewhere)
        return Served(sampler, begun, self._serving)

    def resume(self, before: int, rest: list[Ids]) -> Served:
        """Serve what is left of the epoch that the sampler was loaded with, when `before` batches are through."""
        self._end_epoch()
        begun = self.sampler.resume(rest)
        self._begun, self._steps = begun, before + len(rest)
        return Served(self.sampler, begun, begun.batches)

    def _measure(self, counts: Counts) -> None:
        """Find from the epoch before what the cache gains this job."""
        now = dict(counts, at=time.monotonic())
        before, self._before = self._before, now
        if not before or not self.sampler.measures:
            return
        of = {name: now[name] - before[name] for name in before}
        if min(of["batches"], of["samples"], of["misses"]) <= 0:
            return
        step = max(0.0, of["at"] - of["wait_seconds"]) / of["batches"]
        hit = of["prep_seconds"] / of["samples"]
        miss = hit + of["fetch_seconds"] / of["misses"]
        if step + hit > 0:
            workers = now["num_workers"]
            self.sampler.benefit = benefit(step, hit, miss, workers=workers, batch_size=self._batch_size)

    def _region(self, cache: AnyCache) -> int:
        """Samples of low importance that may stay until they are served: one package at least."""
        stats, sampler = cache.stats(), self.sampler
        share = self._low_share if sampler.low_region is None else sampler.low_region
        package = 1
        if stats.resident_items:
            package = max(1, PACKAGE_BYTES * stats.resident_items // max(1, stats.resident_bytes))
        return max(round(share * stats.resident_items), package)

    def _end_epoch(self) -> None:
        """Add up what the last epoch did."""
        serving, self._serving = self._serving, None
        if serving is not None:
            for name in self._counts:
                self._counts[name] += getattr(serving, name)
            self._low_share = serving.low_requests / max(1, serving.low_requests + serving.high_requests)

    def stats(self) -> ImportanceStats:
        """What was asked for, and what was served instead."""
        serving = self._serving
        counts = {name: self._counts[name] + getattr(serving, name, 0) for name in self._counts}
        packed = self._packed if self._packing is None else self._packing.counts()
        return ImportanceStats(**counts, **packed)

    def close(self) -> None:
        """End the processes that pack and read packages. This job leaves those that use the cache."""
        self.sampler.close()
        if self._packing is not None:
            self._packed = self._packing.counts()
            self._packing.close()
            self._packing = None


class Served:
    """One epoch of an `ImportanceSampler` in one iteration.

    Attributes:
        batches: the ids of each batch, as they are to be started.
    """

    def __init__(self, sampler: ImportanceSampler, begun: Begun, batches: Iterable[Ids]) -> None:
        self._sampler, self._begun = sampler, begun
        self.batches = iter(batches)

    def hand_out(self, ids: Ids) -> torch.Tensor:
        """A batch of `ids` is handed out; its weights."""
        return self._begun.served(ids)

    def end(self) -> None:
        """The iteration is over."""
        self._begun.end()


class _Known:
    """What an epoch has in servers, as `plans.serving.Residents`: what this node believes to be stored. No request."""

    def __init__(self, servers: RedisCache) -> None:
        self.resident = servers.known


class _Packing:
    """The board and the packager of a loader, as `plans.serving.Flags`."""

    def __init__(self, sampler: ImportanceSampler, reader: Reader, context: BaseContext) -> None:
        assert sampler.packages is not None
        self._board = Board(None, sampler.num_samples)
        try:
            self._packager = Packager(
                reader, sampler.packages, write_budget=sampler.write_budget, board=self._board, context=context
            )
        except BaseException:
            self._board.close()
            raise

    def begin(self, draw: Draw, batches: list[Ids], region: int) -> None:
        """A new epoch."""
        flags = np.where(draw.low, LOW, 0).astype(np.uint8)
        for ids in batches:
            flags[ids] |= PENDING
        self._board.flags[:] = flags
        self._board.fields[Field.REGION] = region
        self._board.fields[Field.EPOCH] = draw.plan.epoch
        self._packager.wake()

    def served(self, ids: Ids) -> None:
        self._board.flags[ids] &= LOW

    def missed(self, ids: Ids) -> None:
        self._board.flags[ids] |= MISSED

    def wake(self, *, last: bool = False) -> None:
        self._packager.wake(last=last)

    def counts(self) -> dict[str, int]:
        return self._packager.stats().__dict__

    def close(self) -> None:
        self._packager.close()
        self._board.close()
