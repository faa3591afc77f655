"""The packager of a training process: starts, wakes and ends the processes that pack and read packages."""

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
from stallfree.errors import InputError
from stallfree.ipc.fork_guard import Owner, finalize
from stallfree.ipc.process import Child
from stallfree.platform import how_it_ended
from stallfree.sampling.package_work import LAST, WAKE, WorkSetup, work_main
from stallfree.sampling.plans.sampling_plans import Draw
from stallfree.sampling.shared_flags import LOW, MISSED, PACK, PENDING, READ, Field, SharedFlags
from stallfree.units import parse_size

log = logging.getLogger("stallfree")

PACKAGE_BYTES = 1 << 20
"""Bytes of records in a package, at least: a disk or a server reads that much at full speed."""

LIVES = 4
"""Times that a process is started, at most."""

_STOP_SECONDS = 5.0


class Packager:
    """Packs L-samples into packages, and reads packages into the cache, in two processes beside the training process.

    The first process takes samples that are flagged and are neither resident nor in a package, `MISSED` ones first, and
    writes them into packages as soon as they fill one. The second one reads, while fewer than `Field.REGION` samples
    that are `LOW` and `PENDING` are resident, the package that holds most of those that are not, and puts these into
    the cache with the score `FRESH`; so the region is exceeded by less than one package. Both look at the flags when
    they are woken.

    Training never depends on them: what they cannot do is left to the loader. One that dies is started again by the
    next `wake`, three times; then packaging is off, with one warning in the log. Only the process that made a packager
    wakes and ends its processes.

    Args:
        reader: where the samples come from; its cache must have the policy "importance".
        folder: for the packages, made if it is missing. They stay there: the next run of the same data uses them.
        write_budget: bytes that may be written, as an int or such as "4GiB". 0 only reads what is there.
        context: of `multiprocessing`; starts the processes.
        package_bytes: bytes of records in a package, at least.

    Attributes:
        shared: the flags of the samples, and what both processes count.

    Raises `InputError` for arguments that cannot be used, `StorageError` if the folder or shared memory cannot be.
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
            raise InputError(f"packages need scores that say what stays: give policy='importance', not {policy}")
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
        """A new epoch, in which the L-region may have `share` of the cache, but one package at least."""
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
        """`ids` are pending no more."""
        self.shared.flags[ids] &= LOW

    def missed(self, ids: Ids) -> None:
        """`ids` were requested and are not resident; they are deferred."""
        self.shared.flags[ids] |= MISSED

    def wake(self, *, last: bool = False) -> None:
        """Let both processes look at the flags; `last` says that the epoch is over. Never waits, never raises.

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
        """What was written and read so far."""
        return self.shared.stats()

    def close(self) -> None:
        """End the processes; those that do not end in 5 s are killed. The packages stay. May be called twice."""
        self._end()
        self.shared.close()


class _Process:
    """One of the two processes, as the training process sees it."""

    def __init__(self, row: int, setup: WorkSetup, context: BaseContext) -> None:
        self._row, self._setup, self._context = row, setup, context
        self._child: Child | None = None
        self._starting: threading.Thread | None = None
        self._problem = ""
        self._lives = LIVES
        self._last = False  # the end of an epoch is to be announced

    def wake(self, last: bool) -> str:
        """Wake the process, started anew if it died; why that is of no use any more, or nothing."""
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
        """Send what there is to send, unless the process does not read: then that is sent later."""
        child.flush()
        if not child.writing:
            child.send(LAST if self._last else WAKE)
            self._last = False

    def _start(self) -> None:
        self._lives -= 1
        if self._context.get_start_method() == "fork":
            self._launch()
        else:  # which waits until the new interpreter has read what it is given
            self._starting = threading.Thread(target=self._launch, name="stallfree-start", daemon=True)
            self._starting.start()

    def _launch(self) -> None:
        name = "stallfree-pack" if self._row == PACK else "stallfree-read"
        try:
            child = Child(work_main, self._row, self._setup, context=self._context, name=name)
        except Exception as error:
            self._problem = f"its process cannot be started: {error}"
            return
        self._send(child)
        self._child = child

    def ask_to_end(self) -> None:
        """Let the process end."""
        if self._child is not None:
            self._child.ask_to_end()

    def end(self, deadline: float) -> None:
        """Wait until the process has ended; kill it at `deadline`, in seconds of `time.monotonic`."""
        if self._starting is not None:  # if that takes longer, the process ends when this object is gone
            self._starting.join(max(0.0, deadline - time.monotonic()))
        if self._child is not None:
            self._child.end(deadline)


def _close(processes: list[_Process]) -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    for process in processes:
        process.ask_to_end()
    for process in processes:
        process.end(deadline)
