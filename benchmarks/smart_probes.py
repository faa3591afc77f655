"""Where Smart Caches are known to fail, as short programs that run against stallfree's and against MONAI's.

Each probe gives facts; `smart_failures.py` judges them, by one rule for both. Needs the standard library and NumPy.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np

TOTAL, SIZE, RATE, REPLACE = 20, 10, 0.2, 2
BATCH = 3
EPOCHS = 4
BAD = 13
SLOW_SECONDS = 0.15

Facts = dict[str, Any]


class Side(Protocol):
    """A Smart Cache and its loader."""

    def make(self, items: list[Any], read: Callable[[Any], Any], *, rate: float) -> Any:
        """A window of `SIZE` over `items` in their order. `read` may be cached; a random number is drawn after it."""

    def load(self, data: Any, workers: int, **more: Any) -> Iterable[Any]:
        """A loader that shuffles."""

    def move(self, data: Any) -> None:
        """What the user has to call between two epochs."""

    def keeper(self, data: Any, loader: Any) -> Any:
        """Has the `state_dict` that training goes on from."""


class Read:
    """Reads made-up files.

    Args:
        bad: this one cannot be read.
        slow: from this one on, reading takes `SLOW_SECONDS`.
        log: a file that gets the number of each file that is read.
    """

    def __init__(self, bad: int = -1, slow: int = TOTAL, log: str = "") -> None:
        self.bad, self.slow, self.log = bad, slow, log

    def __call__(self, path: str) -> Any:
        id = int(path.rpartition("-")[2])
        if self.log:
            with open(self.log, "a") as out:
                out.write(f"{id}\n")
        if id == self.bad:
            raise OSError(f"{path}: the file is cut short")
        if id >= self.slow:
            time.sleep(SLOW_SECONDS)
        return {"id": id, "pixels": np.full(16, id, np.float32)}


def paths() -> list[str]:
    return [f"/data/volume-{id}" for id in range(TOTAL)]


def epochs(side: Side, data: Any, loader: Iterable[Any], count: int, *, move: bool = True) -> Iterator[list[Any]]:
    """The batches of one epoch after the other."""
    for number in range(count):
        if number and move:
            side.move(data)
        yield list(loader)


def ids_of(batches: list[Any]) -> list[int]:
    return sorted(int(id) for batch in batches for id in batch["id"])


def windows(side: Side, workers: int = 2, *, rate: float = RATE, move: bool = True, **more: Any) -> Facts:
    """The samples of each epoch."""
    data = side.make(paths(), Read(), rate=rate)
    loader = side.load(data, workers, **more)
    found = []
    for batches in epochs(side, data, loader, EPOCHS, move=move):
        found.append(ids_of(batches))
    return {"windows": found}


def fresh(side: Side) -> Facts:
    """How many random numbers are drawn in all epochs, and how many of them differ."""
    data = side.make(paths(), Read(), rate=RATE)
    loader = side.load(data, 2)
    drawn = [float(d) for batches in epochs(side, data, loader, EPOCHS) for b in batches for d in b["draw"]]
    return {"drawn": len(drawn), "different": len(set(drawn))}


def bad_file(side: Side) -> Facts:
    data = side.make(paths(), Read(bad=BAD), rate=RATE)
    for _ in epochs(side, data, side.load(data, 2), 4 * EPOCHS):
        time.sleep(0.1)
    return {}


def late(side: Side) -> Facts:
    """Replacements take longer than an epoch: the longest epoch after the first."""
    data = side.make(paths(), Read(slow=SIZE), rate=RATE)
    loader = side.load(data, 0)
    list(loader)
    longest = 0.0
    for _ in range(3):
        start = time.perf_counter()
        side.move(data)
        list(loader)
        longest = max(longest, time.perf_counter() - start)
    return {"seconds": longest}


def restart(side: Side) -> Facts:
    """`shutdown` and `start` between two epochs."""
    data = side.make(paths(), Read(), rate=RATE)
    loader = side.load(data, 0)
    for _ in epochs(side, data, loader, EPOCHS):
        pass
    data.shutdown()
    data.start()
    found = []
    for _ in range(EPOCHS):
        side.move(data)
        found.append(ids_of(list(loader)))
    return {"windows": found}


def resume(side: Side) -> Facts:
    """The windows after a stop, in a data set and a loader made anew from the state of the first."""
    data = side.make(paths(), Read(), rate=RATE)
    loader = side.load(data, 0)
    for _ in epochs(side, data, loader, EPOCHS):
        pass
    state = json.loads(json.dumps(side.keeper(data, loader).state_dict()))
    data.shutdown()
    other = side.make(paths(), Read(), rate=RATE)
    loader = side.load(other, 0)
    side.keeper(other, loader).load_state_dict(state)
    return {"windows": [ids_of(batches) for batches in epochs(side, other, loader, EPOCHS)]}


def ranks(side: Side) -> Facts:
    """Files read by two ranks of one host, each of which goes through the whole window once."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        log = str(Path(folder) / "reads")
        turn = [context.Event() for _ in range(3)]
        both = [context.Process(target=_rank, args=(side, rank, log, turn)) for rank in range(2)]
        for process in both:
            process.start()
        for process in both:
            process.join()
        reads = [int(line) for line in Path(log).read_text().split()]
    return {"reads": sum(id < SIZE for id in reads), "files": SIZE}


def _rank(side: Side, rank: int, log: str, turn: list[Any]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="4799", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    if rank:
        turn[1].wait()
    data = side.make(paths(), Read(log=log), rate=RATE)
    list(side.load(data, 0))
    turn[rank + 1].set()
    turn[2].wait()
    data.shutdown()


PROBES: dict[str, Callable[[Side], Facts]] = {
    "fresh": fresh,
    "bad_file": bad_file,
    "persistent": lambda side: windows(side, persistent_workers=True),
    "spawn": lambda side: windows(side, multiprocessing_context="spawn"),
    "forkserver": lambda side: windows(side, multiprocessing_context="forkserver"),
    "forgotten": lambda side: windows(side, move=False),
    "rate_zero": lambda side: windows(side, rate=0),
    "restart": restart,
    "resume": resume,
    "late": late,
    "ranks": ranks,
}


def serve(side: Side, **versions: str) -> None:
    """Run the probe that the command line names, and print its facts, within the limit or not. Ends the process."""
    given = json.loads(sys.argv[1])
    limit = given["limit"]
    alarm = threading.Timer(limit, lambda: _end({"hung": limit}, versions))
    alarm.daemon = True
    alarm.start()
    try:
        facts = PROBES[given["probe"]](side)
    except Exception as error:
        facts = {"error": f"{type(error).__name__}: {error}"}
    _end(facts, versions)


def _end(facts: Facts, versions: dict[str, str]) -> None:
    print(json.dumps({"facts": facts, "versions": versions}), flush=True)
    os._exit(0)  # threads that hang would hold the interpreter
