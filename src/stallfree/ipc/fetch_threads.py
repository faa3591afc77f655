"""Threads for calls that wait for storage, which may never answer."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

CLOSE_SECONDS = 5.0
"""Longest wait for a call that is under way when the threads are closed."""

_Result = TypeVar("_Result")
_Tasks = queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]

log = logging.getLogger("stallfree")


class FetchThreads(Executor):
    """Up to `count` threads, started as they are needed.

    `concurrent.futures.ThreadPoolExecutor` waits for its threads without limit, at the latest when the process ends.
    These are daemon threads, and are left behind if their storage does not answer.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._tasks: _Tasks = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end, self._tasks, self._threads)
        self._end.atexit = False

    def submit(self, call: Callable[..., _Result], /, *arguments: Any, **_: Any) -> Future[_Result]:
        """Call `call(*arguments)` in a thread. Raises `RuntimeError` after the end."""
        future: Future[_Result] = Future()
        with self._lock:
            if not self._end.alive:
                raise RuntimeError("the threads are closed")
            self._tasks.put((future, call, arguments))
            if len(self._threads) < self._count and not self._idle.acquire(blocking=False):
                name = f"stallfree-fetch-{len(self._threads)}"
                thread = threading.Thread(target=_run, args=(self._tasks, self._idle), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel the calls that have not begun, and wait for the others, for `CLOSE_SECONDS` at most. Idempotent."""
        with self._lock:
            self._end()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may run in any thread
                thread.join(max(0.0, deadline - time.monotonic()))
        left = sum(thread.is_alive() for thread in self._threads)
        if left:
            log.warning(
                "%d thread%s for storage after %g s: left behind, until storage answers or the process ends",
                left,
                " still waits" if left == 1 else "s still wait",
                CLOSE_SECONDS,
            )


def _run(tasks: _Tasks, idle: threading.Semaphore) -> None:
    while (task := tasks.get()) is not None:
        future, call, arguments = task
        if future.set_running_or_notify_cancel():
            try:
                result = call(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del task, future, call, arguments
        idle.release()


def _end(tasks: _Tasks, threads: list[threading.Thread]) -> None:
    """Cancel the calls that have not begun, and let the threads end."""
    while True:
        try:
            task = tasks.get_nowait()
        except queue.Empty:
            break
        if task is not None:
            task[0].cancel()
    for _ in threads:
        tasks.put(None)
