"""The key-value store of a job, in a process of its own.

Its thread looks up the name of each peer that connects, under a lock of the C library. A fork of its process at that
moment copies the lock, and the child waits forever when it looks up a name itself.
"""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

LIMIT = 60.0


class JobStore:
    """The store, as torchrun keeps it. Ends with `close`, or with this process.

    Args:
        host: at which it listens.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        context = multiprocessing.get_context("forkserver")
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=_keep, args=(theirs, host), daemon=True)
        self._process.start()
        theirs.close()
        self.port: int = self._answer()

    def set(self, key: str, value: str) -> None:
        """What any process may do."""
        self._end.send((key, value))
        self._answer()

    def _answer(self) -> Any:
        assert self._end.poll(LIMIT), f"the job's store has said nothing for {LIMIT:.0f} s"
        return self._end.recv()

    def close(self) -> None:
        """End it, and wait until it is gone. May be called twice."""
        if not self._end.closed:
            self._end.close()
            self._process.join()
            self._process.close()


def _keep(connection: Connection, host: str) -> None:
    kept = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT))
    connection.send(kept.port)
    while True:
        try:
            key, value = connection.recv()
        except EOFError:
            return
        kept.set(key, value)
        connection.send(None)
