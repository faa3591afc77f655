"""Threads for calls that wait for storage, which may never answer."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from stallfree.raising import log

CLOSE_SECONDS = 5.0
"""Longest wait for a call that is under way when the threads are closed."""


class FetchThreads(Executor):
    """Up to `count` threads, started as they are needed.

    `concurrent.futures.ThreadPoolExecutor` waits for its threads without limit, at the latest when the process ends.
    These are daemon threads, and are left behind if their storage does not answer.
    """

    def __init__(self, count: int) -> None:
        self._count, self._tasks, self._idle = count, queue.SimpleQueue[Any](), threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._lock, self._closed = threading.Lock(), False

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        """Call `call(*arguments)` in a thread. Raises `RuntimeError` after the end, and if no thread can be started."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads are closed")
            if len(self._threads) < self._count and not self._idle.acquire(blocking=False):
                name, shared = f"stallfree-fetch-{len(self._threads)}", (self._tasks, self._idle)
                thread = threading.Thread(target=_run, args=shared, name=name, daemon=True)
                thread.start()  # an error if there are too many threads
                self._threads.append(thread)
            self._tasks.put((future, call, arguments))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel the calls that have not begun, and wait for the others, for `CLOSE_SECONDS` at most. Idempotent."""
        with self._lock:
            self._close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may run in any thread
                thread.join(max(0.0, deadline - time.monotonic()))
        if left := sum(thread.is_alive() for thread in self._threads):
            log.warning("%d threads left behind, still waiting for storage after %g s", left, CLOSE_SECONDS)

    def _close(self) -> None:
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                if (task := self._tasks.get_nowait()) is not None:
                    task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)

    __del__ = _close


def _run(tasks: queue.SimpleQueue[Any], idle: threading.Semaphore) -> None:
    while (task := tasks.get()) is not None:
        future, call, arguments = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)
        del task, future, call, arguments  # their memory may be needed before the next task
        idle.release()
