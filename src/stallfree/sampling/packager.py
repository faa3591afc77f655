"""The packager of a training process: starts, wakes and stops the processes that pack and read packages."""

from __future__ import annotations

import logging
import threading
import time
from multiprocessing.context import BaseContext
from pathlib import Path

import numpy as np

from stallfree.batches.messages import Ids
from stallfree.batches.reader import Reader
from stallfree.cache import PackageStats
from stallfree.cache.packages import prepare_folder
from stallfree.errors import InputError, cache_required, text_of
from stallfree.ipc.fork_guard import Owner, finalize
from stallfree.ipc.process import Child
from stallfree.platform import how_it_ended
from stallfree.sampling.package_work import LAST, WAKE, WorkSetup, work_main
from stallfree.sampling.plans.sampling_plans import Draw
from stallfree.sampling.shared_flags import LOW, MISSED, PACK, PENDING, READ, Field, SharedFlags
from stallfree.units import parse_size

log = logging.getLogger("stallfree")

PACKAGE_BYTES = 1 << 20
"""Minimum bytes of records in a package: a disk or a server reads this amount at full speed."""

LIVES = 4
"""Maximum number of starts of a process."""

_STOP_SECONDS = 5.0


class Packager:
    """Packs L-samples into packages, and reads packages into the cache, in two separate processes.

    The first process selects flagged samples that are neither resident nor in a package, `MISSED` ones first, and
    writes them as soon as they fill a package. The second process reads packages while fewer than `Field.REGION` `LOW`
    and `PENDING` samples are resident. It reads the package with the most absent ones and puts these into the cache
    with the score `FRESH`, so it exceeds the region by less than one package. Both check the flags when woken.

    Training does not depend on these processes: the loader handles all samples that they do not. The next `wake`
    restarts a process that died, up to three times; then packaging is disabled and one warning is logged. Only the
    process that created a packager wakes and stops its processes.

    Args:
        reader: reads the samples; its cache must have the policy "importance".
        folder: of the packages, created if missing. Packages persist: the next run on the same data uses them.
        write_budget: maximum bytes to write, as an int or a string like "4GiB". 0 only reads existing packages.
        context: `multiprocessing` context that starts the processes.
        package_bytes: minimum bytes of records in a package.

    Attributes:
        shared: the flags of the samples, and the counts of both processes.

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
        budget, place = parse_size(write_budget, "write_budget"), prepare_folder(folder)
        self._cache = cache
        self.shared = SharedFlags(cache.num_ids)
        setup = WorkSetup(reader, self.shared, place, budget, package_bytes)
        self._processes = [_Process(row, setup, context) for row in (PACK, READ)]
        self._owner = Owner()
        self._off = False
        self._end = finalize(self, _close, self._processes)

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

    def missed(self, ids: Ids) -> None:
        """Mark `ids` as requested but not resident; they are deferred."""
        self.shared.flags[ids] |= MISSED

    def wake(self, *, last: bool = False) -> None:
        """Make both processes check the flags; `last`: the epoch has ended. Never waits, never raises.

        The first call starts them.
        """
        if self._off or not self._end.alive or not self._owner.is_here:
            return
        problem = next(filter(None, [process.wake(last) for process in self._processes]), "")
        if problem:
            self._off = True
            log.warning("packaging is off: %s. Unimportant samples are fetched one by one from now on", problem)
            for process in self._processes:
                process.ask_to_end()

    def stats(self) -> PackageStats:
        """Counts of packages written and read so far."""
        return self.shared.stats()

    def close(self) -> None:
        """Stop the processes; kill those that do not exit in 5 s. The packages persist. Idempotent."""
        self._end()
        self.shared.close()


class _Process:
    """The handle of one of the two processes in the training process."""

    def __init__(self, row: int, setup: WorkSetup, context: BaseContext) -> None:
        self._row, self._setup, self._context = row, setup, context
        self._child: Child | None = None
        self._starting: threading.Thread | None = None
        self._problem = ""
        self._lives = LIVES
        self._last = False  # the end of an epoch is still to be sent

    def wake(self, last: bool) -> str:
        """Wake the process, and restart it if it died. Return the reason if it cannot be restarted, else ""."""
        self._last |= last
        if self._starting is not None and self._starting.is_alive():
            return ""
        child = self._child
        if child is not None and not child.alive:
            child.end(0.0)
            self._child = None
            if self._lives == 0:
                self._problem = f"its process died {LIVES} times, the last time {how_it_ended(child.exit_code)}"
        if not self._problem and self._child is None:
            self._start()
        elif self._child is not None:
            self._send(self._child)
        return self._problem

    def _send(self, child: Child) -> None:
        """Send the pending message; defer it if the process does not read."""
        child.flush()
        if not child.writing:
            child.send(LAST if self._last else WAKE)
            self._last = False

    def _start(self) -> None:
        self._lives -= 1
        if self._context.get_start_method() == "fork":
            self._launch()
        else:  # this waits until the new interpreter has read its arguments
            self._starting = threading.Thread(target=self._launch, name="stallfree-start", daemon=True)
            self._starting.start()

    def _launch(self) -> None:
        name = "stallfree-pack" if self._row == PACK else "stallfree-read"
        try:
            child = Child(work_main, self._row, self._setup, context=self._context, name=name)
        except Exception as error:
            self._problem = f"its process cannot be started: {text_of(error)}"
            return
        self._send(child)
        self._child = child

    def ask_to_end(self) -> None:
        """Request the process to stop."""
        if self._child is not None:
            self._child.ask_to_end()

    def end(self, deadline: float) -> None:
        """Wait until the process has exited; kill it at `deadline`, in seconds of `time.monotonic`."""
        if self._starting is not None:  # if that takes longer, the process exits when this object is freed
            self._starting.join(max(0.0, deadline - time.monotonic()))
        if self._child is not None:
            self._child.end(deadline)


def _close(processes: list[_Process]) -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    for process in processes:
        process.ask_to_end()
    for process in processes:
        process.end(deadline)
