"""The packager of a training process: starts and stops the process that packs samples and reads packages."""

from __future__ import annotations

import logging
import tempfile
import weakref
from multiprocessing.context import BaseContext
from pathlib import Path

import numpy as np

from stallfree.datasets.reader import Reader
from stallfree.errors import InputError, StorageError, cache_required, text_of
from stallfree.importance.packages import LOW, MISSED, PENDING, Field, SharedFlags, package_main
from stallfree.importance.plans.sampling_plans import Draw
from stallfree.ipc.forked import Owner
from stallfree.ipc.process import Child, end_all
from stallfree.loader.messages import Ids
from stallfree.platform import how_it_ended
from stallfree.stats import ImportanceStats
from stallfree.units import parse_size

log = logging.getLogger("stallfree")

PACKAGE_BYTES = 1 << 20
"""Minimum bytes of records in a package: a disk or a server reads this amount at full speed."""

LIVES = 4
"""Maximum number of starts of the process."""

_STOP_SECONDS = 5.0


class Packager:
    """Packs L-samples into packages, and reads packages into the cache, in a separate process.

    The process selects flagged samples that are neither resident nor in a package, `MISSED` ones first, and writes them
    as soon as they fill a package. While fewer than `Field.REGION` `LOW` and `PENDING` samples are resident, it reads
    the package with the most absent ones and puts these into the cache with the score `FRESH`, so it exceeds the region
    by less than one package.

    Training does not depend on the process: the loader handles all samples that it does not. The next `wake` restarts
    it if it died, without its packages; after `LIVES` deaths packaging ends, with one logged warning. It exits with
    this object or with the training process, whichever ends first. In a forked child this object does nothing.

    Args:
        reader: of the loader; its cache has the policy "importance".
        folder: of the packages; created if missing.
        write_budget: maximum bytes to write, such as "1GiB".
        context: `multiprocessing` context that starts the process.
        package_bytes: minimum bytes of records in a package.

    Attributes:
        shared: the flags of the samples, and the counts.

    Raises `InputError` for invalid arguments, `StorageError` if the folder or shared memory is not usable.
    """

    def __init__(
        self,
        reader: Reader,
        folder: str | Path,
        *,
        write_budget: int | str,
        context: BaseContext,
        package_bytes: int = PACKAGE_BYTES,
    ) -> None:
        cache = reader.cache
        if cache is None or not cache.policy.given:
            policy = "no cache" if cache is None else f"a cache with policy={cache.policy.name!r}"
            raise cache_required(f"packages need scores that say what stays: give policy='importance', not {policy}")
        if package_bytes < 1:
            raise InputError(
                f"package_bytes={package_bytes}: give the bytes of a package, {PACKAGE_BYTES} for instance"
            )
        budget, place = parse_size(write_budget, "write_budget"), _prepare(folder)
        self._cache = cache
        self.shared = SharedFlags(cache.num_ids)
        self._arguments = reader, self.shared, place, budget, package_bytes
        self._context, self._lives, self._owner = context, LIVES, Owner()
        self._running: list[Child] = []  # the process, if it was started
        self._end = weakref.finalize(self, end_all, self._running, _STOP_SECONDS)

    def begin(self, draw: Draw, batches: list[Ids], share: float) -> None:
        """Begin an epoch in which the L-region may have `share` of the cache, and at least one package."""
        flags = np.where(draw.low, LOW, 0).astype(np.uint8)
        for ids in batches:
            flags[ids] |= PENDING
        stats = self._cache.stats()
        package = max(1, PACKAGE_BYTES * stats.resident_items // max(1, stats.resident_bytes))
        self.shared.flags[:] = flags
        self.shared.fields[Field.REGION] = max(round(share * stats.resident_items), package)
        self.shared.fields[Field.EPOCH] = draw.plan.epoch
        self.wake()

    def served(self, ids: Ids) -> None:
        """Mark `ids` as no longer pending."""
        self.shared.flags[ids] &= LOW
        self.wake()

    def missed(self, ids: Ids) -> None:
        """Mark `ids` as requested but not resident; they are deferred."""
        self.shared.flags[ids] |= MISSED

    def wake(self) -> None:
        """Make the process check the flags; start it if it is not running. Never raises."""
        self.shared.fields[Field.STEP] += 1
        if not self._end.alive or not self._owner.is_here or any(child.alive for child in self._running):
            return
        problem = ""
        for dead in self._running:
            dead.end(0.0)
            problem = f"its process died {LIVES} times, the last time {how_it_ended(dead.exit_code)}"
        self._running.clear()
        if self._lives:
            self._lives -= 1
            try:
                child = Child(package_main, *self._arguments, context=self._context, name="stallfree-pack")
                self._running.append(child)
                return
            except Exception as error:
                problem = f"its process cannot be started: {text_of(error)}"
        log.warning("packaging is off: %s. Unimportant samples are fetched one by one from now on", problem)
        self._end()

    def stats(self) -> ImportanceStats:
        """Counts of packages written and read so far."""
        return ImportanceStats(**self.shared.stats())

    def close(self) -> None:
        """Stop the process, and kill it if it does not exit in 5 s. The packages are removed. Idempotent."""
        self._end()
        self.shared.close()


def _prepare(folder: str | Path) -> Path:
    """Create the folder for packages with mode 0700 if missing. Raises `StorageError` if it is not usable."""
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise StorageError(f"the folder {path} for packages cannot be used: {error}. Give another folder") from error
    return path
