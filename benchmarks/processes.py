"""Several jobs or nodes at once, as forked processes of one host, and rates of threads and processes."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

PATIENCE = 120.0
"""Longest wait for other processes, in seconds."""

Meet = Callable[[], None]
"""Waits until all processes and the one that started them have called it as often."""


class TeamError(RuntimeError):
    """A process failed. The message holds its traceback."""


class Team:
    """`count` forked processes that run `target(number, meet, *arguments)` at once.

    Use it with `with`: at the end no process is left.
    """

    def __init__(self, count: int, target: Callable[..., Any], *arguments: Any, patience: float = PATIENCE) -> None:
        context = get_context("fork")
        self._patience = patience
        self._gate = context.Barrier(count + 1)
        self._members = []
        for number in range(count):
            receiver, sender = context.Pipe(duplex=False)
            parameters = (target, number, self._gate, patience, sender, arguments)
            process = context.Process(target=_run, args=parameters)
            process.start()
            sender.close()
            self._members.append((process, receiver))

    def meet(self) -> None:
        """Wait for all processes. Raises `TeamError` if one of them has failed."""
        try:
            self._gate.wait(self._patience)
        except threading.BrokenBarrierError:
            self.results()
            raise TeamError(f"the processes have not met within {self._patience:.0f} s") from None

    def results(self) -> list[Any]:
        """Return what each process returned. Raises `TeamError` for one that failed."""
        results = []
        for number, (_, receiver) in enumerate(self._members):
            try:
                ok, result = receiver.recv() if receiver.poll(self._patience) else (False, "no result in time")
            except EOFError:
                ok, result = False, "it died"
            if not ok and result is not None:
                raise TeamError(f"process {number}: {result}")
            results.append(result)
        return results

    def __enter__(self) -> Team:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed:
            self._gate.abort()
        for process, receiver in self._members:
            process.join(5.0 if failed else 30.0)
            if process.is_alive():
                process.kill()
                process.join()
            receiver.close()


def _run(target: Callable[..., Any], number: int, gate: Any, patience: float, sender: Any, arguments: Any) -> None:
    try:
        sender.send((True, target(number, lambda: gate.wait(patience), *arguments)))
    except threading.BrokenBarrierError:
        sender.send((False, None))  # another process failed
    except BaseException:
        gate.abort()
        sender.send((False, traceback.format_exc()))


def run_nodes(count: int, meetings: int, target: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `target(number, meet, *arguments)` on `count` nodes, which meet so many times, and return their results.

    A node is a forked process with the environment that torchrun sets, and with its own folder of stallfree.
    """
    port = get_context("fork").RawValue("i", 0)
    with Team(count, _as_node, count, port, target, arguments) as team:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.value = store.port
        for _ in range(1 + meetings):
            team.meet()
        return team.results()


def _as_node(number: int, meet: Meet, count: int, port: Any, target: Callable[..., Any], arguments: Any) -> Any:
    torch.set_num_threads(1)
    root = Path(os.environ["STALLFREE_ROOT"]).parent / f"node-{number}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    meet()
    os.environ |= {
        "STALLFREE_ROOT": str(root),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port.value),
        "RANK": str(number),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(number),
        "GROUP_WORLD_SIZE": str(count),
    }
    return target(number, meet, *arguments)


def fetch_rate(fetch: Callable[[int], object], ids: Sequence[int], threads: int) -> float:
    """Return fetches per second of `ids` by several threads at once."""
    with ThreadPoolExecutor(threads) as pool:
        begun = time.perf_counter()
        for _ in pool.map(fetch, ids):
            pass
        return len(ids) / (time.perf_counter() - begun)


def prep_rate(prepare: Callable[[Any], object], records: Sequence[Any], workers: int, seconds: float) -> float:
    """Return calls of `prepare` per second by `workers` processes at once, on `records` that are in memory."""
    with Team(workers, _prepare, prepare, records, seconds) as team:
        team.meet()
        return float(sum(team.results()))


def _prepare(
    _number: int, meet: Meet, prepare: Callable[[Any], object], records: Sequence[Any], seconds: float
) -> float:
    torch.set_num_threads(1)
    for record in records[:8]:
        prepare(record)
    meet()
    calls, begun = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < seconds:
        prepare(records[calls % len(records)])
        calls += 1
    return calls / elapsed
