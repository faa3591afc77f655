"""Slow storage to order, for tests and benchmarks."""

import contextlib
import mmap
import os
import struct
import threading
import time
import weakref
from typing import Any, Protocol

from stallfree.errors import object_closed
from stallfree.ipc.folders import SharedFolder
from stallfree.ipc.locks import FileLock
from stallfree.pipeline.compose import Source
from stallfree.pipeline.values import payload_bytes
from stallfree.sources.mapped import BaseSource, as_source
from stallfree.units import parse_number, parse_rate

LOCK_SECONDS = 30.0
"""Longest wait for the lock on the state, which is held for microseconds."""

_STATE = struct.Struct("@ddQQ")
_FIRST = _STATE.pack(-float("inf"), -float("inf"), 0, 0)


class Clock(Protocol):
    """A monotonic clock that can wait, such as the module `time`; tests bring their own."""

    def monotonic(self) -> float:
        """Seconds since some fixed instant, the same for all processes of the host."""

    def sleep(self, seconds: float, /) -> None:
        """Return after at least `seconds`."""


class ThrottledSource(BaseSource):
    """`source` behind storage of a given speed, with exact counters.

    The samples are the same.

    The limits and the counters hold for all threads and processes that share this object, whether it got there by fork
    or by pickling. There is no credit for idle time: in any w seconds at most `bandwidth * w` bytes and one record
    arrive. A record's size is that of the bytes, arrays and tensors in it; numbers, texts and 0-dimensional arrays
    count 0. A fetch that fails is not counted.

    Each request passes three stations: it waits for its turn under `iops`, then for the line under `bandwidth`, and
    arrives `latency` after that. The inner fetch comes first and its own time is not made up for.

    Attributes:
        source: the inner source.

    Args:
        source: a `Source` or any map-style data set.
        bandwidth: bytes per second, as a number or as `"60MB/s"`. None sets no limit.
        latency: seconds that are added to each request. None adds nothing.
        iops: requests per second. None sets no limit.
        clock: gives the time and waits; to be replaced in tests.

    Raises:
        InputError: a limit that is no positive number (latency may be 0), or a data set that cannot be a source.
        WaitError: from `fetch`, when a stopped process holds the state for 30 s.

    Example:
        ```python
        slow = sf.testing.ThrottledSource(dataset, bandwidth="10MB/s", latency=0.001)
        image, label = slow[0]
        assert slow.requests == 1
        ```
    """

    passes_through = True

    def __init__(
        self,
        source: Any,
        bandwidth: float | str | None = None,
        latency: float | None = None,
        iops: float | None = None,
        *,
        clock: Clock = time,
    ) -> None:
        self.source: Source = as_source(source)
        self.pipeline = self.source.pipeline
        self._bandwidth = None if bandwidth is None else parse_rate(bandwidth, "bandwidth")
        self._latency = 0.0 if latency is None else parse_number(latency, "latency", zero=True)
        self._iops = None if iops is None else parse_number(iops, "iops")
        self._monotonic, self._sleep = clock.monotonic, clock.sleep
        self._attach(f"throttle-{os.urandom(8).hex()}")

    def _attach(self, name: str) -> None:
        self._name = name
        self._state = _State(name)
        self._turns: dict[int, threading.Lock] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_state", "_turns")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach(self._name)

    def __len__(self) -> int:
        return len(self.source)

    def _record(self, id: int) -> Any:
        with self._turn():
            record = self.source.fetch(id)
        wait = self._reserve(payload_bytes(record))
        if wait > 0:
            self._sleep(wait)
        return record

    def _turn(self) -> contextlib.AbstractContextManager[Any]:
        """What a thread holds while it is in the inner fetch: a lock if that is not made for threads."""
        if getattr(self.source, "threads", True):
            return contextlib.nullcontext()
        return self._turns.setdefault(os.getpid(), threading.Lock())  # by process: a fork may copy a lock that is held

    def _reserve(self, size: int) -> float:
        """Count a record of `size` bytes and return the seconds from now until it has arrived."""
        with self._state.hold("a throttled fetch"):
            now = self._monotonic()
            free, line_free, requests, transferred = self._state.load()
            done = max(now, free)
            if self._iops is not None:
                free = done + 1 / self._iops
            if self._bandwidth is not None:
                done = line_free = max(done, line_free) + size / self._bandwidth
            self._state.store(free, line_free, requests + 1, transferred + size)
        return done + self._latency - now

    @property
    def requests(self) -> int:
        """Records fetched since `reset` by all threads and processes together."""
        return self._counters()[0]

    @property
    def bytes(self) -> int:
        """Bytes of the records fetched since `reset` by all threads and processes together."""
        return self._counters()[1]

    def _counters(self) -> tuple[int, int]:
        with self._state.hold("reading the counters of a throttle"):
            _, _, requests, transferred = self._state.load()
        return requests, transferred

    def reset(self) -> None:
        """Set both counters to 0. The limits go on as they are."""
        with self._state.hold("resetting the counters of a throttle"):
            free, line_free, _, _ = self._state.load()
            self._state.store(free, line_free, 0, 0)

    def close(self) -> None:
        """Leave the shared state; the last process to leave removes it.

        Freeing this object does the same.
        """
        self._state.close()

    def _where(self, id: int) -> str:
        return self.source.where(id)

    def fingerprint(self) -> str:
        """The fingerprint of the inner source: the data are the same."""
        return self.source.fingerprint()

    @property
    def classes(self) -> list[str]:
        """The classes of the inner source. Raises `AttributeError` when it has none."""
        return self.source.classes  # type: ignore[attr-defined,no-any-return]

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each class of the inner source.

        Raises `AttributeError` when it has none.
        """
        return self.source.class_to_idx  # type: ignore[attr-defined,no-any-return]

    def __repr__(self) -> str:
        limits = f"bandwidth={self._bandwidth}, latency={self._latency}, iops={self._iops}"
        return f"ThrottledSource({self.source!r}, {limits})"


class _State:
    """The state that all processes share: when the next request may start, when the line is free, and two counters.

    It lies in a mapped file under a lock that the kernel frees when its holder dies. Every field is written at once, so
    what a killed process leaves is valid; at worst its last request is missing from a counter.
    """

    def __init__(self, name: str) -> None:
        self._folder = SharedFolder(name, initialize=lambda path: (path / "state").write_bytes(_FIRST))
        self._lock = FileLock(self._folder.path / "lock")
        with open(self._folder.path / "state", "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _STATE.size)
        self.close = weakref.finalize(self, _leave, self._memory, self._lock, self._folder)

    def hold(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Hold the lock."""
        if not self.close.alive:
            raise object_closed(f"{what}: this ThrottledSource is closed: make a new one")
        return self._lock.hold(LOCK_SECONDS, what)

    def load(self) -> tuple[float, float, int, int]:
        """Start of the next request and end of the last transfer (seconds of the clock), requests, bytes."""
        return _STATE.unpack_from(self._memory)

    def store(self, free: float, line_free: float, requests: int, transferred: int) -> None:
        """Replace what `load` returns. The lock must be held."""
        _STATE.pack_into(self._memory, 0, free, line_free, requests, transferred)


def _leave(memory: mmap.mmap, lock: FileLock, folder: SharedFolder) -> None:
    memory.close()
    lock.close()
    folder.close()
