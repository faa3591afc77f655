"""The packager of a training process: starts, wakes and ends the processes that pack and read packages."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from stallfree.cache import PackageStats
from stallfree.cache.packages import prepare_folder
from stallfree.channel import Channel
from stallfree.errors import InputError
from stallfree.loader.board import PACK, READ, Board
from stallfree.loader.packing import LAST, STOP, WAKE, HelperSetup, helper_main
from stallfree.loader.reader import Reader
from stallfree.platform import how_it_ended
from stallfree.units import parse_size

log = logging.getLogger("stallfree")

PACKAGE_BYTES = 1 << 20
"""Bytes of records in a package, at least: what a disk or a server reads as fast as it can."""

LIVES = 4
"""Times that a process is started, at most."""

_STOP_SECONDS = 5.0
_NAMES = {PACK: "pack", READ: "read"}


class Packager:
    """Packs L-samples into packages, and reads packages into the cache, in two processes beside the training process.

    The first process takes samples that are flagged on the board and are neither resident nor in a package, `MISSED`
    ones first, and writes them into packages as soon as they fill one. The second one reads, while fewer than
    `Field.REGION` samples that are `LOW` and `PENDING` are resident, the package that holds most of those that are not,
    and puts these into the cache with the score `FRESH`; so the region is exceeded by less than one package. Both look
    at the board when they are woken.

    Training never depends on them: what they cannot do is left to the loader. One that dies is started again by the
    next `wake`, three times; then packaging is off, with one warning in the log. Only the process that made a packager
    wakes and ends its processes.

    Args:
        reader: where the samples come from; its cache must have the policy "importance".
        folder: for the packages, made if it is missing. They stay there: the next run of the same data uses them.
        write_budget: bytes that may be written, as an int or such as "4GiB". 0 only reads what is there.
        board: says what is wanted, and is the caller's to close.
        context: of `multiprocessing`; starts the processes.
        package_bytes: bytes of records in a package, at least.

    Raises `InputError` for arguments that cannot be used, `StorageError` when the folder cannot be.
    """

    def __init__(
        self,
        reader: Reader,
        folder: str | Path,
        *,
        write_budget: int | str,
        board: Board,
        context: BaseContext,
        package_bytes: int = PACKAGE_BYTES,
    ) -> None:
        cache = reader.cache
        if cache is None or not cache.policy.given:
            policy = "no cache" if cache is None else f"a cache with policy={cache.policy.name!r}"
            raise InputError(f"packages need scores that say what stays: give policy='importance', not {policy}")
        if board.num_ids != cache.num_ids:
            raise InputError(f"the board is for {board.num_ids} samples, the cache for {cache.num_ids}: give one alike")
        if package_bytes < 1:
            raise InputError(
                f"package_bytes={package_bytes}: give the bytes of a package, {PACKAGE_BYTES} for instance"
            )
        budget = parse_size(write_budget, "write_budget")
        setup = HelperSetup(reader, board, prepare_folder(folder), budget, package_bytes)
        self._board = board
        ends: list[Connection] = []
        self._helpers = [_Helper(row, setup, context, ends) for row in (PACK, READ)]
        self._pid = os.getpid()
        self._off = False
        self._end = weakref.finalize(self, _close, self._pid, self._helpers)

    def wake(self, last: bool = False) -> None:
        """Have both processes look at the board; `last` says that the epoch is over. Never waits, never raises.

        The first call starts them.
        """
        if self._off or not self._end.alive or os.getpid() != self._pid:
            return
        try:
            problem = next(filter(None, [helper.wake(last) for helper in self._helpers]), "")
        except Exception as error:
            problem = f"its process cannot be started: {error}"
        if problem:
            self._off = True
            log.warning("packaging is off: %s. Unimportant samples are fetched one by one from now on", problem)
            for helper in self._helpers:
                helper.tell(STOP)

    def stats(self) -> PackageStats:
        """What was written and read so far."""
        return self._board.stats()

    def close(self) -> None:
        """End the processes; those that do not end in 5 s are killed. The packages stay. May be called twice."""
        self._end()


class _Helper:
    """One of the two processes, as the training process sees it.

    `ends` are the training process's ends of all connections, which a forked process closes.
    """

    def __init__(self, row: int, setup: HelperSetup, context: BaseContext, ends: list[Connection]) -> None:
        self._row, self._setup, self._context, self._ends = row, setup, context, ends
        self._process: BaseProcess | None = None
        self._channel: Channel | None = None
        self._starting: threading.Thread | None = None
        self._problem = ""
        self._lives = LIVES
        self._last = False

    def wake(self, last: bool) -> str:
        """Wake the process, started anew if it died; why that is of no use any more, or nothing."""
        started = self._starting is None or not self._starting.is_alive()
        if self._process is not None and started and not self._process.is_alive():
            if not self._problem and self._lives == 0:
                self._problem = f"its process died {LIVES} times, the last time {how_it_ended(self._process.exitcode)}"
            self._bury()
        if self._problem:
            return self._problem
        if self._process is None:
            self._start()
        self.tell(LAST if last else WAKE)
        return ""

    def tell(self, message: bytes) -> None:
        """Send a message; to one that does not read, the end of an epoch and the end of all are not forgotten."""
        channel = self._channel
        if channel is None:
            return
        self._last |= message == LAST
        channel.flush()
        if message == STOP or not channel.writing:
            channel.send(LAST if self._last and message == WAKE else message)
            self._last = False

    def _start(self) -> None:
        self._lives -= 1
        ours, theirs = self._context.Pipe()
        self._ends.append(ours)
        self._ours, self._channel = ours, Channel(ours)
        method = self._context.get_start_method()
        setup = replace(self._setup, trainer=os.getpid(), child=method != "forkserver")
        self._process = self._context.Process(  # type: ignore[attr-defined]
            target=helper_main,
            args=(theirs, self._row, setup, list(self._ends) if method == "fork" else []),
            name=f"stallfree-{_NAMES[self._row]}",
            daemon=True,
        )
        if method == "fork":
            self._launch(self._process, theirs)
        else:  # which waits until the new interpreter has read what it is given
            self._starting = threading.Thread(
                target=self._launch, args=(self._process, theirs), name="stallfree-start", daemon=True
            )
            self._starting.start()

    def _launch(self, process: BaseProcess, theirs: Connection) -> None:
        try:
            process.start()
        except Exception as error:
            self._problem = f"its process cannot be started: {error}"
        finally:
            theirs.close()

    def _bury(self) -> None:
        """Let go of a process that has ended, or was never started."""
        if self._starting is not None:
            self._starting.join()
        if self._process is not None and self._process.pid is not None:
            self._process.join()
            self._process.close()
        if self._channel is not None:
            self._ends.remove(self._ours)
            self._channel.close()
        self._process = self._channel = self._starting = None

    def end(self, deadline: float) -> None:
        """Wait until the process has ended; kill it at `deadline`, in seconds of `time.monotonic`."""
        if self._starting is not None:
            self._starting.join(max(0.0, deadline - time.monotonic()))
            if self._starting.is_alive():  # its process ends by itself when it finds that nobody is there
                assert self._channel is not None
                self._channel.close()
                return
        if self._process is not None and self._process.pid is not None:
            self._process.join(max(0.0, deadline - time.monotonic()))
            if self._process.is_alive():
                self._process.kill()
        self._bury()


def _close(owner: int, helpers: list[_Helper]) -> None:
    if os.getpid() != owner:
        return  # a forked child: the processes are its parent's
    deadline = time.monotonic() + _STOP_SECONDS
    for helper in helpers:
        helper.tell(STOP)
    for helper in helpers:
        helper.end(deadline)
