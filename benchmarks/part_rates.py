"""Rates of the parts of a job, each measured by itself: fetches from storage, and prep in processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from stallfree.errors import WaitError, WorkerError

START_SECONDS = 30.0
"""Longest wait for the processes that measure to be ready."""


def fetch_rate(fetch: Callable[[int], object], ids: Sequence[int], threads: int = 4) -> float:
    """Fetches per second of `ids` by several threads at once."""
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        for _ in pool.map(fetch, ids):
            pass
        return len(ids) / (time.perf_counter() - start)


def prep_rate(prepare: Callable[[Any], object], records: Sequence[Any], workers: int, seconds: float = 1.0) -> float:
    """Calls of `prepare` per second by `workers` processes at once, on `records` that are in memory."""
    context = get_context("fork")
    ready = context.Barrier(workers)
    pipes, processes = [], []
    for _ in range(workers):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_prepare, args=(prepare, records, seconds, ready, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        return sum(_receive(pipe) for pipe in pipes)
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join(seconds)
            if process.is_alive():
                process.kill()
                process.join()


def _prepare(
    prepare: Callable[[Any], object], records: Sequence[Any], seconds: float, ready: Barrier, pipe: Connection
) -> None:
    """In a process of its own: sends the rate, or the exception that came instead."""
    try:
        torch.set_num_threads(1)
        for record in records[:8]:
            prepare(record)
        ready.wait(START_SECONDS)
        calls = 0
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            prepare(records[calls % len(records)])
            calls += 1
        pipe.send(calls / elapsed)
    except Exception as error:
        pipe.send(error)


def _receive(pipe: Connection) -> float:
    if not pipe.poll(2 * START_SECONDS):
        raise WaitError(
            f"a process that measures prep has not answered for {2 * START_SECONDS:.0f} s: try again "
            "when the machine is less busy"
        )
    try:
        answer: float | Exception = pipe.recv()
    except EOFError:
        raise WorkerError("a process that measures prep died: see that memory does not run short", ids=[]) from None
    if isinstance(answer, Exception):
        raise answer
    return answer
