"""Six jobs on one shared loader over a tier, with kills and joins: does anything grow?"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import stallfree as sf
from benchmarks.data import FromFunction

Json = dict[str, Any]
NAME, SEED = "soak", 7
JOBS, STEADY = 6, 3
"""Jobs, and those of them that are never killed."""
SAMPLES, VALUES, BATCH = 2000, 16_384, 32
STEP_SECONDS, END_SECONDS = 0.05, 60.0
CAPACITY, CAPACITY_PER_NODE = "48MiB", "96MiB"
"""Of memory and the server; the samples take 125 MiB."""
WHAT = ("memory", "descriptors", "threads")
_SUBREAPER = 36  # of prctl
_MIB = 1 << 20


# -- one job ----------------------------------------------------------------------------------------------------------


def make_value(id: int) -> Any:
    """An array of 64 KiB, full of its id."""
    return np.full(VALUES, id, np.float32)


@sf.mark_random
def shift(values: Any) -> Any:
    """The array plus a random number below 1/2."""
    return torch.from_numpy(values + random.random() / 2)


def job(folder: str) -> None:
    """Train until SIGTERM; each epoch has every sample once, with its own values."""
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    torch.set_num_threads(1)
    cache: Json = {"capacity": CAPACITY, "form": "prepared", "transform": shift, "name": NAME, "seed": SEED}
    options: Json = {"batch_size": BATCH, "shuffle": True, "num_workers": 2, "seed": SEED, "with_ids": True}
    with (
        sf.RedisStore(capacity_per_node=CAPACITY_PER_NODE) as store,
        sf.CachedDataset(FromFunction(SAMPLES, make_value), store=store, **cache) as cached,
        sf.SharedLoader(cached, group=NAME, **options) as loader,
    ):
        while not ending:
            _epoch(loader, ending)
            with open(Path(folder, "ledger"), "ab") as ledger:  # appended in one write
                ledger.write(b"." if not ending else b"")


def _epoch(loader: Any, ending: list[int]) -> None:
    seen = np.zeros(SAMPLES, np.int64)
    for batch in loader:
        ids = torch.as_tensor(batch.ids)
        wrong = (batch.data.mean(dim=1) - ids).abs().gt(0.51)
        if wrong.any():
            raise AssertionError(f"the samples {ids[wrong].tolist()} have the values of others")
        np.add.at(seen, ids.numpy(), 1)
        time.sleep(STEP_SECONDS)
        if ending:
            return
    if not (seen == 1).all():
        raise AssertionError(f"samples missing: {np.flatnonzero(seen == 0)}, repeated: {np.flatnonzero(seen > 1)}")


# -- the run ----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The jobs, what was done to them, and the samples of what they take.

    Attributes:
        folder: for a file that counts epochs, and the output of the jobs.
        jobs: number of each running job by its process id.
        events: (seconds since the start, what was done).
        series: per sample, the sums of `WHAT` over all processes.
        shm: bytes in use in `/dev/shm` per sample.
        failed: what jobs that ended by themselves wrote.
        ending: process ids of the jobs that were killed, or told to leave.
    """

    folder: str
    jobs: dict[int, int] = field(default_factory=dict)
    events: list[tuple[float, str]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    series: list[list[float]] = field(default_factory=list)
    shm: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    ending: set[int] = field(default_factory=set)

    @property
    def ledger(self) -> Path:
        return Path(self.folder, "ledger")

    def start(self, number: int) -> None:
        """Start a job."""
        self.ledger.touch()
        with open(Path(self.folder, f"job-{number}.log"), "wb") as log:
            process = subprocess.Popen([sys.executable, "-m", "benchmarks.soak", self.folder], stdout=log, stderr=log)
        process.returncode = 0  # waited for in `reap`
        self.jobs[process.pid] = number

    def reap(self) -> list[int]:
        """The numbers of jobs that have ended."""
        ended = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            number = self.jobs.pop(pid, None)
            if number is None:
                continue
            ended.append(number)
            if pid not in self.ending:
                log = Path(self.folder, f"job-{number}.log").read_text(errors="replace")
                self.failed.append(f"job {number} ended with {status}: {log[-2000:]}")

    def end(self, number: int, kind: int) -> None:
        """Kill a job, or let it leave."""
        pid = next(pid for pid, each in self.jobs.items() if each == number)
        self.ending.add(pid)
        os.kill(pid, kind)


def below() -> list[psutil.Process]:
    """Return all processes below this one, and those that lost their parents."""
    return psutil.Process().children(recursive=True)


def is_server(process: psutil.Process) -> bool:
    return process.name() in ("redis-server", "valkey-server")


def figures(process: psutil.Process) -> list[float]:
    """Return memory in bytes, descriptors and threads of a process; nothing for one that has ended.

    Memory is the process's proportional part of its anonymous and shared memory. Pages of files are left out: the
    kernel can drop them, and their parts depend on what else runs on the machine.
    """
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        memory = [int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
        return [sum(memory), process.num_fds(), process.num_threads()]
    except (OSError, psutil.Error):
        return []


def shm_bytes() -> int:
    """Bytes in use in `/dev/shm`, also those of files without a name."""
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def soak(folder: str, minutes: float) -> Json:
    """Start the jobs, disturb them, and sample what they take once per second."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    generator, empty = random.Random(SEED), shm_bytes()
    seconds, pause = 60 * minutes, 6.0 if minutes <= 10 else 30.0
    run = Run(folder)
    for number in range(JOBS):
        run.start(number)
    began = time.monotonic()
    due, events = began + pause, 0
    while (now := time.monotonic()) < began + seconds and not run.failed:
        for number in run.reap():
            if not run.failed:
                run.start(number)
                run.events.append((now - began, "joins"))
        if now >= due:
            due, events = due + pause, events + 1
            run.events.append((now - began, _disturb(run, events, generator)))
        _sample(run, now - began, empty)
        time.sleep(max(0.0, began + len(run.seconds) - time.monotonic()))
    _finish(run)
    print("\n".join(run.failed), Counter(event for _, event in run.events), file=sys.stderr)
    warm = min(600.0, seconds / 3)
    kept = np.array(run.seconds) >= warm
    series = {what: np.array([sample[number] for sample in run.series])[kept] for number, what in enumerate(WHAT)}
    series["shm"] = np.array(run.shm)[kept]
    return {
        "epochs": os.stat(run.ledger).st_size,
        "kills": sum("killed" in event for _, event in run.events),
        "joins": sum("joins" in event for _, event in run.events),
        "failed": len(run.failed),
        "memory": float(np.median(series["memory"])) / _MIB,
        "memory_growth": growth(np.array(run.seconds)[kept], series["memory"], run.events, warm),
        **{what: last_over_first(series[what]) for what in ("descriptors", "threads", "shm")},
        "left": shm_bytes() - empty,
    }


def last_over_first(values: Any) -> float:
    """Return the median of the last quarter over that of the first."""
    first, *_, last = np.array_split(values, 4)
    return float(np.median(last) / np.median(first))


def growth(seconds: Any, values: Any, events: list[tuple[float, str]], warm: float) -> float:
    """Return percent per hour: the median of the slopes between all pairs of quiet moments, over the median.

    A quiet moment is the last third of the time between two events: what was disturbed has settled.
    """
    moments = [moment for moment, event in events if moment >= warm and event != "joins"]
    times, medians = [], []
    for before, event in pairwise(moments):
        quiet = (seconds > event - (event - before) / 3) & (seconds < event)
        if quiet.any():
            times.append(event)
            medians.append(float(np.median(values[quiet])))
    if len(times) < 2:
        return 0.0
    first, second = np.triu_indices(len(times), 1)
    slopes = (np.array(medians)[second] - np.array(medians)[first]) / (np.array(times)[second] - np.array(times)[first])
    return 100 * 3600 * float(np.median(slopes)) / float(np.median(values))


def _disturb(run: Run, event: int, generator: random.Random) -> str:
    """Do the next thing to the jobs; returns what."""
    processes = below()
    parents = {process.pid: process.ppid() for process in processes}
    loader = [process.pid for process in processes if process.pid not in run.jobs and not is_server(process)]
    coordinators = [pid for pid in loader if pid in parents.values()]
    if event % 20 == 15 and coordinators:
        os.kill(coordinators[0], signal.SIGKILL)
        return "coordinator killed"
    if event % 20 == 10:
        for process in filter(is_server, processes):
            process.kill()
        return "server killed"
    workers = [pid for pid in loader if parents[pid] in coordinators]
    if event % 3 == 1 and workers:
        os.kill(generator.choice(workers), signal.SIGKILL)
        return "worker killed"
    number = generator.choice([number for number in run.jobs.values() if number >= STEADY])
    run.end(number, signal.SIGKILL if event % 3 == 2 else signal.SIGTERM)
    return "job killed" if event % 3 == 2 else "job leaves"


def _sample(run: Run, moment: float, empty: int) -> None:
    run.series.append([sum(values) for values in zip(*filter(None, map(figures, below())), strict=True)])
    run.seconds.append(moment)
    run.shm.append(shm_bytes() - empty)


def _finish(run: Run) -> None:
    """Let all jobs leave, and wait until no process is left."""
    begun = time.monotonic()
    for pid in list(run.jobs):
        run.ending.add(pid)
        os.kill(pid, signal.SIGTERM)
    while processes := below():
        run.reap()
        if time.monotonic() > begun + END_SECONDS:
            run.failed.append(f"still there after {END_SECONDS:.0f} s: {processes}")
            for process in processes:
                process.kill()
            break
        time.sleep(0.05)


if __name__ == "__main__":
    job(sys.argv[1])
