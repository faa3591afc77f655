"""Data sets that open their file or connection at the first sample, and keep it in various places.

They can be sent to other processes as long as nothing is open. A file that is open when processes are forked has one
position for all of them: the records that they read are then those of other samples.
"""

import contextlib
import functools
import os
import socket
import socketserver
import struct
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch.utils.data import Dataset

WORDS = 32
SIZE = 8 * WORDS


def write_rows(path: Path, count: int) -> Path:
    """A file of records of one size: record `id` is the number `id`, 32 times."""
    path.write_bytes(np.repeat(np.arange(count), WORDS).tobytes())
    return path


class Calls:
    """Which processes read how many samples. The counts are in a file, one process id after the other."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def add(self) -> None:
        file = os.open(self.path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        os.write(file, struct.pack("q", int(os.readlink("/proc/self"))))  # what uses `os.getpid` may count as random
        os.close(file)

    def by_process(self) -> Counter[int]:
        data = Path(self.path).read_bytes() if Path(self.path).exists() else b""
        return Counter(number for (number,) in struct.iter_unpack("q", data))


class Handle:
    """An open file of records. Other processes get to run between the seek and the reads."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115

    def read(self, id: int) -> bytes:
        self.file.seek(id * SIZE)
        parts = []
        for _ in range(4):
            os.sched_yield()
            parts.append(self.file.read(SIZE // 4))
        return b"".join(parts)

    def close(self) -> None:
        self.file.close()


class Connection:
    """A connection to a `RowServer`, with the methods of a `Handle`."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(path)

    def read(self, id: int) -> bytes:
        self.socket.sendall(struct.pack("q", id))
        parts: list[bytes] = []
        while sum(map(len, parts)) < SIZE:
            os.sched_yield()
            parts.append(self.socket.recv(SIZE // 4))
        return b"".join(parts)

    def close(self) -> None:
        self.socket.close()


class RowServer:
    """Threads of this process, which send record `id` for each request of 8 bytes."""

    def __init__(self, path: Path) -> None:
        self._open = opened = list[socket.socket]()

        class Answer(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                opened.append(self.request)
                with contextlib.suppress(OSError):
                    while len(id := self.rfile.read(8)) == 8:
                        self.wfile.write(id * WORDS)

        self._server = socketserver.ThreadingUnixStreamServer(str(path), Answer)
        threading.Thread(target=self._server.serve_forever, args=(0.01,)).start()

    def close(self) -> None:
        self._server.shutdown()
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._server.server_close()


def same(row: Any) -> Any:
    return row


class Rows(Dataset[Any]):
    """Sample `id` is `(id, its record)`."""

    opened: Callable[[str], Any] = Handle

    def __init__(self, path: Path, count: int, calls: Calls, transform: Callable[[Any], Any] = same) -> None:
        self.path, self.count, self.calls, self.transform = str(path), count, calls, transform
        self.file, self.ready, self.files = None, False, dict[str, Any]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> Any:
        self.calls.add()
        return id, self.transform(np.frombuffer(self.handle().read(id), np.int64).copy())

    def handle(self) -> Any:
        """What is open, opened at the first call."""
        raise NotImplementedError


class InAttribute(Rows):
    file: Any

    def handle(self) -> Any:
        if self.file is None:
            self.file = Handle(self.path)
        return self.file


class BehindFlag(InAttribute):
    """That the file is open is remembered apart from it."""

    def handle(self) -> Any:
        if not self.ready:
            self.file = Handle(self.path)
            self.ready = True
        return self.file


class InReader(Rows):
    def __init__(self, path: Path, count: int, calls: Calls) -> None:
        super().__init__(path, count, calls)
        self.reader = InAttribute(path, count, calls)

    def handle(self) -> Any:
        return self.reader.handle()


class InDict(Rows):
    def handle(self) -> Any:
        if self.path not in self.files:
            self.files[self.path] = type(self).opened(self.path)
        return self.files[self.path]


class OverSocket(InDict):
    """`path` is that of a server."""

    opened = Connection


@functools.lru_cache
def opened(path: str) -> Any:
    return Handle(path)


class InLruCache(Rows):
    def handle(self) -> Any:
        return opened(self.path)


_file: Any = None


class InGlobal(Rows):
    def handle(self) -> Any:
        global _file
        if _file is None:
            _file = Handle(self.path)
        return _file


_local = threading.local()


class InThreadLocal(Rows):
    def handle(self) -> Any:
        if getattr(_local, "file", None) is None:
            _local.file = Handle(self.path)
        return _local.file


def records(path: str) -> Generator[bytes, int, None]:
    id = yield b""
    with contextlib.closing(Handle(path)) as file:
        while True:
            id = yield file.read(id)


class InGenerator(Rows):
    """The file is a local variable of a generator of Python."""

    requests: Any = None

    def handle(self) -> Any:
        if self.requests is None:
            self.requests = records(self.path)
            next(self.requests)
        return SimpleNamespace(read=self.requests.send)


PLACES = (InAttribute, BehindFlag, InReader, InDict, InLruCache, InGlobal, InThreadLocal, InGenerator, OverSocket)


@contextlib.contextmanager
def lazy_rows(place: type[Rows], folder: Path, count: int) -> Iterator[Rows]:
    """A data set with nothing open, and its file or server. What this process opened meanwhile is closed after it."""
    calls = Calls(folder / "calls")
    server = RowServer(folder / "socket") if place is OverSocket else None
    path = folder / "socket" if server else write_rows(folder / "rows", count)
    try:
        yield place(path, count, calls)  # type: ignore[call-arg]
    finally:
        _forget()
        if server:
            server.close()


def _forget() -> None:
    """Nothing is open any more in what belongs to the module."""
    global _file
    for file in (_file, getattr(_local, "file", None)):
        if file is not None:
            file.close()
    _file = _local.file = None
    opened.cache_clear()
