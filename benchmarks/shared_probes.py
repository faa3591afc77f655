"""What befalls consumers of a shared loader who are late, slow, careful or killed, as short programs for any of them.

Each probe gives facts; `shared_faults.py` puts them into words, by one rule for all. Needs the standard library, NumPy
and torch.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.shared_team import family

SAMPLES, BATCH, WIDTH = 200, 8, 2048
BATCHES = SAMPLES // BATCH
STEP, SLOW = 0.04, 0.2
"""Seconds that a consumer takes for a batch."""
SOME = 10
"""Batches that somebody has had when something happens."""
PATIENCE = 15.0
"""Seconds after which a standstill counts as one for ever."""

Facts = dict[str, Any]


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Sample i is (i, i, ..., i) and i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((WIDTH,), index), index


class Side(Protocol):
    """A shared loader."""

    def produce(self, consumers: int) -> None:
        """What the producing process does, if it is one that is started by hand, from when so many are there."""

    by_hand: bool

    def open(self, **options: Any) -> Iterable[Any]:
        """In a consumer: what gives one epoch of `Numbers` after the other, in their order."""

    def close(self, loader: Any) -> None: ...

    def producer(self, pids: list[int]) -> int:
        """The producing process, where it was started by one of these consumers."""


class Stage:
    """The processes of one probe, and the log of each consumer."""

    def __init__(self, side: Side, folder: str, together: int) -> None:
        self.side, self.folder = side, Path(folder)
        self.context = get_context("fork")
        self.consumers: list[Any] = []
        self.begun = time.monotonic()
        self.by_hand = self.context.Process(target=side.produce, args=(together,)) if side.by_hand else None
        if self.by_hand:
            self.by_hand.start()

    def start(self, epochs: int, **habits: Any) -> int:
        """Start a consumer; its number."""
        number = len(self.consumers)
        process = self.context.Process(target=consume, args=(self.side, self._log(number), epochs), kwargs=habits)
        process.start()
        self.consumers.append(process)
        return number

    def _log(self, number: int) -> Path:
        return self.folder / f"log-{number}"

    def lines(self, number: int) -> list[Facts]:
        """What consumer `number` has noted up to now."""
        if not self._log(number).exists():
            return []
        return [json.loads(line) for line in self._log(number).read_text().splitlines() if line.endswith("}")]

    def batches(self, number: int) -> list[Facts]:
        return [line for line in self.lines(number) if "ids" in line]

    def until(self, number: int, batches: int) -> None:
        """Wait until consumer `number` has had so many batches."""
        while len(self.batches(number)) < batches:
            time.sleep(0.005)

    def ended(self, number: int, since: float) -> bool:
        """Wait until consumer `number` has ended, as long as batches come: false after a standstill."""
        while self.consumers[number].is_alive():
            last = max([line["t"] for line in self.batches(number)] + [since])
            if time.monotonic() - last > PATIENCE:
                return False
            time.sleep(0.02)
        return True

    def producer(self) -> int:
        if self.by_hand:
            return int(self.by_hand.pid)
        return self.side.producer([process.pid for process in self.consumers])

    def tell(self, number: int, since: float | None = None) -> Facts:
        """What consumer `number` had: for each epoch the samples that are missing and those that came again."""
        ended = self.ended(number, self.begun if since is None else since)
        lines = self.batches(number)
        epochs = sorted({line["epoch"] for line in lines})
        ids = [[id for line in lines if line["epoch"] == epoch for id in line["ids"] if id >= 0] for epoch in epochs]
        after = [line["t"] for line in lines if since is None or line["t"] >= since]
        times = [*([] if since is None else [since]), *after]
        return {
            "ended": ended,
            "missing": [SAMPLES - len(set(each)) for each in ids],
            "again": [len(each) - len(set(each)) for each in ids],
            "first": [line["ids"][0] for line in lines[:1]],
            "changed": sum(not line["same"] for line in self.lines(number) if "same" in line),
            "spoilt": sum(min(line["ids"]) < 0 for line in lines),
            "batches": len(lines),
            "standstill": max((b - a for a, b in itertools.pairwise(times)), default=0.0),
            "seconds": [max(t) - min(t) for t in ([li["t"] for li in lines if li["epoch"] == e] for e in epochs)],
        }

    def end(self) -> None:
        """Kill all that is left."""
        for pid in family()[1:]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def consume(
    side: Side, log: Path, epochs: int, *, step: float = STEP, keep: bool = False, write: bool = False, **options: Any
) -> None:
    """A consumer that notes what it gets.

    Args:
        step: seconds that it takes for a batch, which it looks at again afterwards.
        keep: keep the batches, and look at all of them at the end of the epoch instead.
        write: set each batch to -1 when it is done with it.
    """
    torch.set_num_threads(1)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(**facts: Any) -> None:
        os.write(out, (json.dumps({"t": time.monotonic()} | facts) + "\n").encode())

    note(asks=True)
    loader = side.open(**options)
    for epoch in range(epochs):
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for values, _ in loader:
            seen = values.clone()
            note(epoch=epoch, ids=seen[:, 0].tolist())
            time.sleep(step)
            if keep:
                kept.append((values, seen))
                continue
            note(same=bool((values == seen).all()))
            if write:
                values.fill_(-1)
        for values, seen in kept:
            note(same=bool((values == seen).all()))
    side.close(loader)


# -- probes -----------------------------------------------------------------------------------------------------------


def tail(stage: Stage) -> Facts:
    one = stage.start(3)
    return stage.tell(one)


def join(stage: Stage, **options: Any) -> Facts:
    """A second consumer comes when the first has had some batches of its first epoch."""
    one = stage.start(4, **options)
    stage.until(one, SOME)
    two = stage.start(2, **options)
    stage.until(two, 1)
    found = stage.tell(two)
    asked, came = stage.lines(two)[0]["t"], stage.batches(two)[0]["t"]
    other = stage.tell(one)
    had = [sum(line["t"] < when for line in stage.batches(one)) for when in (asked, came)]
    return found | {"waited": came - asked, "had": had, "other": other}


def laggard(stage: Stage, **options: Any) -> Facts:
    """Two consumers, one of which takes five times as long for a batch."""
    fast, slow = stage.start(2, **options), stage.start(2, step=SLOW, **options)
    return stage.tell(slow) | {"other": stage.tell(fast)}


def keeper(stage: Stage) -> Facts:
    """Two consumers, one of which keeps all batches of an epoch and looks at them at its end."""
    one, two = stage.start(2), stage.start(2, keep=True)
    return stage.tell(two) | {"other": stage.tell(one)}


def writer(stage: Stage) -> Facts:
    """Two consumers, one of which writes into its batches while the slower one uses them."""
    one, two = stage.start(1, write=True, step=STEP / 4), stage.start(1)
    return stage.tell(two) | {"other": stage.tell(one)}


def consumer_killed(stage: Stage) -> Facts:
    """One of two is killed in mid-epoch."""
    one, two = stage.start(2), stage.start(2)
    stage.until(two, SOME)
    os.kill(stage.consumers[two].pid, signal.SIGKILL)
    return stage.tell(one, time.monotonic())


def producer_killed(stage: Stage) -> Facts:
    """The producing process is killed in mid-epoch."""
    one, two = stage.start(2), stage.start(2)
    stage.until(two, SOME)
    os.kill(stage.producer(), signal.SIGKILL)
    now = time.monotonic()
    return stage.tell(one, now) | {"other": stage.tell(two, now)}


def listening(stage: Stage) -> Facts:
    """TCP ports that the processes listen on, and who may connect to their Unix sockets."""
    one = stage.start(1)
    stage.until(one, 1)
    inodes = set()
    for pid in family():
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(entry))
            except OSError:
                continue
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                ports.append("every address" if set(fields[1].split(":")[0]) == {"0"} else "loopback")
    below = Path(os.environ["STALLFREE_ROOT"]).rglob("*") if not stage.side.by_hand else []
    modes = [oct(path.stat().st_mode & 0o777)[2:] for path in below if path.is_socket()]
    return {"ports": ports, "modes": modes}


TOGETHER = {"tail": 1, "join": 1, "listening": 1}
"""Consumers that begin together; two where it is not said."""
PROBES: dict[str, Callable[[Stage], Facts]] = {
    "tail": tail,
    "join": join,
    "laggard": laggard,
    "keeper": keeper,
    "writer": writer,
    "consumer_killed": consumer_killed,
    "producer_killed": producer_killed,
    "listening": listening,
}


def serve(side: Side, **versions: str) -> None:
    """Run the probe that the command line names, and print its facts, within the limit or not. Ends the process."""
    given = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(side, folder, TOGETHER.get(given["probe"], 2))
        alarm = threading.Timer(given["limit"], lambda: _end(stage, {"hung": given["limit"]}, versions))
        alarm.daemon = True
        alarm.start()
        try:
            facts = PROBES[given["probe"]](stage)
        except Exception as error:
            facts = {"error": f"{type(error).__name__}: {error}"}
        _end(stage, facts, versions)


def _end(stage: Stage, facts: Facts, versions: dict[str, str]) -> None:
    stage.end()
    print(json.dumps({"facts": facts, "versions": versions}), flush=True)
    os._exit(0)
