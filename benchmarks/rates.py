"""Rates of the parts of a job, each measured alone: fetches from storage, and prep in processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

START_SECONDS = 30.0
"""Longest wait until the processes that measure are ready."""


def fetch_rate(fetch: Callable[[int], object], ids: Sequence[int], threads: int = 4) -> float:
    """Return fetches per second of `ids` by several threads at once."""
    with ThreadPoolExecutor(threads) as pool:
        begun = time.perf_counter()
        for _ in pool.map(fetch, ids):
            pass
        return len(ids) / (time.perf_counter() - begun)


def prep_rate(prepare: Callable[[Any], object], records: Sequence[Any], workers: int, seconds: float = 1.0) -> float:
    """Return calls of `prepare` per second by `workers` processes at once, on `records` that are in memory."""
    context = get_context("fork")
    ready, rates = context.Barrier(workers), context.Queue()
    arguments = (prepare, records, seconds, ready, rates)
    processes = [context.Process(target=_prepare, args=arguments, daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    total: float = sum(rates.get(timeout=seconds + 2 * START_SECONDS) for _ in processes)
    for process in processes:
        process.join()
    return total


def _prepare(prepare: Callable[[Any], object], records: Sequence[Any], seconds: float, ready: Any, rates: Any) -> None:
    torch.set_num_threads(1)
    for record in records[:8]:
        prepare(record)
    ready.wait(START_SECONDS)
    calls, begun = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < seconds:
        prepare(records[calls % len(records)])
        calls += 1
    rates.put(calls / elapsed)
