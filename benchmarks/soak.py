"""Six jobs on one shared loader over a tier, with kills and joins: does anything grow?

`python benchmarks/run.py soak [--minutes 60]` runs it and draws the chart; `--quick` takes three minutes.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.harness import ROOT, Check, Json, Options, Report, run_child, say, scratch_folder

NAME = "soak"
QUESTION = (
    "Six jobs on one `SharedLoader` over memory, disk and Redis, of which some are killed, leave and join: do memory, "
    "descriptors, threads or shared memory grow?"
)
MODULE = "benchmarks.soak"
PICTURE = ROOT / "docs" / "benchmarks" / "soak.svg"

MINUTES, QUICK_MINUTES = 60.0, 3.0
WARM_SECONDS = 600.0
"""The start, which is not counted; at most a third of the run."""
JOBS, STEADY = 6, 3
"""Jobs, and those of them that are never killed."""
SAMPLES, VALUES, BATCH = 2000, 16_384, 32
STEP_SECONDS = 0.05
ROOM = {"capacity": "48MiB", "redis": "96MiB"}
"""Of memory and the server; the samples take 125 MiB."""
MOST_GROWTH = 1.0
"""Percent per hour, of memory."""
MOST_RATIO = 1.05
"""Of the last quarter over the first: descriptors, threads and shared memory."""
EVENT_SECONDS, QUICK_EVENT_SECONDS = 30.0, 6.0
END_SECONDS = 60.0
WHAT = ("memory", "rss", "descriptors", "threads", "shm")
GROUPS = ("steady jobs", "other jobs", "shared loader", "servers")
_FIELDS = ("Pss_Anon:", "Pss_Shmem:", "Rss:")
_SEED = 7
_SUBREAPER = 36  # of prctl
_MIB = 1 << 20


# -- one job ----------------------------------------------------------------------------------------------------------


class Values(Dataset[Any]):
    """Arrays of 64 KiB, each full of its id."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, id: int) -> Any:
        return np.full(VALUES, id, np.float32)


@sf.mark_random
def shift(values: Any) -> Any:
    """The array plus a random number below 1/2."""
    return torch.from_numpy(values + random.random() / 2)


def job(given: Json) -> None:
    """Train until SIGTERM; each epoch has every sample once, with its own values."""
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    torch.set_num_threads(1)
    with (
        sf.RedisStore(capacity_per_node=ROOM["redis"]) as store,
        sf.CachedDataset(
            Values(),
            capacity=ROOM["capacity"],
            store=store,
            form="prepared",
            transform=shift,
            name=NAME,
            seed=_SEED,
        ) as cached,
        sf.SharedLoader(
            cached,
            group=NAME,
            batch_size=BATCH,
            shuffle=True,
            num_workers=2,
            seed=_SEED,
            with_ids=True,
        ) as loader,
    ):
        while not ending:
            _epoch(loader, ending)
            with open(given["ledger"], "ab") as ledger:  # appended in one write
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
        jobs: number of each running job by its process id.
        events: (seconds since the start, what was done).
        series: per sample and group, the figures of `WHAT` but shared memory.
        shm: bytes in use in `/dev/shm` per sample.
        failed: jobs that ended by themselves.
    """

    given: Json
    jobs: dict[int, int] = field(default_factory=dict)
    events: list[tuple[float, str]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    series: list[dict[str, list[float]]] = field(default_factory=list)
    shm: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    ending: set[int] = field(default_factory=set)

    def start(self, number: int) -> None:
        """Start a job."""
        given = json.dumps({"what": "job", "number": number, **self.given})
        with open(f"{self.given['disk']}-{number}.log", "wb") as log:
            process = subprocess.Popen([sys.executable, "-m", MODULE, given], stdout=log, stderr=log)
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
                log = Path(f"{self.given['disk']}-{number}.log").read_text(errors="replace")
                self.failed.append(f"job {number} ended with {status}: {log[-2000:]}")

    def end(self, number: int, kind: int) -> None:
        """Kill a job, or let it leave."""
        pid = next(pid for pid, each in self.jobs.items() if each == number)
        self.ending.add(pid)
        os.kill(pid, kind)


@dataclass(frozen=True)
class Process:
    """A process, as `/proc` shows it."""

    pid: int
    parent: int
    command: bytes


def below() -> dict[int, Process]:
    """All processes below this one, and those that lost their parents."""
    every = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = Path(f"/proc/{entry}/stat").read_text()
                command = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            every[int(entry)] = Process(int(entry), int(status.rpartition(")")[2].split()[1]), command)
    found: dict[int, Process] = {}
    todo = [os.getpid()]
    while todo:
        parent = todo.pop()
        for pid, process in every.items():
            if process.parent == parent:
                found[pid] = process
                todo.append(pid)
    return found


def group_of(process: Process, jobs: dict[int, int]) -> str:
    """The group of a process."""
    if process.pid in jobs:
        return GROUPS[0] if jobs[process.pid] < STEADY else GROUPS[1]
    if b"redis-server" in process.command or b"valkey-server" in process.command:
        return GROUPS[3]
    return GROUPS[2]


def figures(pid: int) -> list[float]:
    """Memory and RSS in bytes, descriptors and threads of a process; nothing for one that has ended.

    Memory is the process's proportional part of its anonymous and shared memory. Pages of files are left out: the
    kernel can drop them, and their parts depend on what else runs on the machine (libraries).
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        threads = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[17])
    except OSError:
        return []
    memory = {words[0]: int(words[1]) * 1024 for words in map(str.split, lines) if words[0] in _FIELDS}
    return [memory.get("Pss_Anon:", 0) + memory.get("Pss_Shmem:", 0), memory.get("Rss:", 0), descriptors, threads]


def shm_bytes() -> int:
    """Bytes in use in `/dev/shm`, also those of files without a name."""
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def soak(given: Json) -> Json:
    """The run: starts the jobs, disturbs them, and samples what they take once per second."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    rng, empty = random.Random(_SEED), shm_bytes()
    run = Run({"ledger": given["ledger"]})
    Path(given["ledger"]).touch()
    for number in range(JOBS):
        run.start(number)
    began = time.monotonic()
    due, events = began + given["event_seconds"], 0
    while (now := time.monotonic()) < began + given["seconds"] and not run.failed:
        for number in run.reap():
            if not run.failed:
                run.start(number)
                run.events.append((now - began, f"job {number} joins"))
        if now >= due:
            due, events = due + given["event_seconds"], events + 1
            run.events.append((now - began, _disturb(run, events, rng)))
        _sample(run, now - began, empty)
        time.sleep(max(0.0, began + len(run.seconds) - time.monotonic()))
    ended = _finish(run)
    return {
        "seconds": run.seconds,
        "total": {what: _total(run, place) for place, what in enumerate(WHAT[:4])} | {"shm": run.shm},
        "groups": {group: _thinned(run, group) for group in GROUPS},
        "events": run.events,
        "failed": run.failed,
        "epochs": os.stat(given["ledger"]).st_size,
        "end_seconds": ended,
        "left": shm_bytes() - empty,
    }


def _disturb(run: Run, event: int, rng: random.Random) -> str:
    """Do the next thing to the jobs; returns what."""
    processes = below()
    parents = {process.parent for process in processes.values()}
    loader = [process for process in processes.values() if group_of(process, run.jobs) == GROUPS[2]]
    coordinators = [process.pid for process in loader if process.pid in parents]
    if event % 20 == 15 and coordinators:
        os.kill(coordinators[0], signal.SIGKILL)
        return "coordinator killed"
    if event % 20 == 10:
        for process in processes.values():
            if b"redis-server" in process.command or b"valkey-server" in process.command:
                os.kill(process.pid, signal.SIGKILL)
        return "server killed"
    workers = [process.pid for process in loader if process.parent in coordinators]
    if event % 3 == 1 and workers:
        os.kill(rng.choice(workers), signal.SIGKILL)
        return "worker killed"
    number = rng.choice([number for number in run.jobs.values() if number >= STEADY])
    kind = signal.SIGKILL if event % 3 == 2 else signal.SIGTERM
    run.end(number, kind)
    return f"job {number} {'killed' if kind == signal.SIGKILL else 'leaves'}"


def _sample(run: Run, at: float, empty: int) -> None:
    sums = {group: [0.0] * 4 for group in GROUPS}
    for process in below().values():
        for place, value in enumerate(figures(process.pid)):
            sums[group_of(process, run.jobs)][place] += value
    run.seconds.append(round(at, 2))
    run.series.append(sums)
    run.shm.append(shm_bytes() - empty)


def _finish(run: Run) -> float:
    """Let all jobs leave; returns the seconds until no process is left."""
    start = time.monotonic()
    for pid in list(run.jobs):
        run.ending.add(pid)
        os.kill(pid, signal.SIGTERM)
    while below():
        run.reap()
        if time.monotonic() > start + END_SECONDS:
            commands = Counter(process.command[:200].decode(errors="replace") for process in below().values())
            run.failed.append(f"still there after {END_SECONDS:.0f} s: {dict(commands)}")
            for pid in below():
                os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.05)
    return time.monotonic() - start


def _total(run: Run, place: int) -> list[float]:
    return [sum(each[group][place] for group in GROUPS) for each in run.series]


def _thinned(run: Run, group: str) -> dict[str, list[float]]:
    """The medians of ten seconds each."""
    return {
        what: [
            statistics.median(each[group][place] for each in run.series[at : at + 10])
            for at in range(0, len(run.series), 10)
        ]
        for place, what in enumerate(WHAT[:4])
    }


# -- the report -------------------------------------------------------------------------------------------------------


def run(options: Options) -> Report:
    minutes = options.minutes or (QUICK_MINUTES if options.quick else MINUTES)
    seconds = 60 * minutes
    event_seconds = QUICK_EVENT_SECONDS if minutes <= 10 else EVENT_SECONDS
    say(f"  {minutes:g} minutes")
    with scratch_folder() as scratch, tempfile.TemporaryDirectory() as folder:
        found = run_child(
            MODULE,
            {
                "what": "soak",
                "ledger": str(Path(folder) / "ledger"),
                "seconds": seconds,
                "event_seconds": event_seconds,
            },
            scratch=scratch,
            seconds=seconds + 2 * END_SECONDS,
        )
    if found["failed"]:
        say("  " + "\n  ".join(found["failed"]))
    if not options.quick:
        PICTURE.write_text(chart(found), encoding="utf-8")
    warm = min(WARM_SECONDS, seconds / 3)
    rows = [
        [name, *(f"{each / unit:,.0f}" for each in quarters(found, what, warm)), f"{growth(found, what, warm):+.2f}%"]
        for what, (name, unit) in _SHOWN.items()
    ]
    done = Counter(_kind(what) for _, what in found["events"])
    checks = [
        Check(
            "six jobs, kills and joins: growth of memory, % per hour", growth(found, "memory", warm), MOST_GROWTH, "<="
        )
    ]
    for what, words in (("descriptors", "descriptors"), ("threads", "threads"), ("shm", "shared memory")):
        first, *_, last = quarters(found, what, warm)
        checks.append(Check(f"the same: {words}, last quarter over first", last / first, MOST_RATIO, "<="))
    wrong = "the same: jobs that failed, or had a wrong, missing or repeated sample"
    checks += [
        Check(wrong, len(found["failed"]), 0, "==", ".0f"),
        Check("the same: bytes left in shared memory at the end", found["left"], 0, "<=", ",.0f"),
    ]
    return Report(
        columns=["of all processes", "1st quarter", "2nd", "3rd", "last", "growth per hour"],
        rows=rows,
        checks=checks,
        notes=[
            "![Memory, descriptors, threads and shared memory over time](../soak.svg)",
            f"{minutes:g} minutes, {found['epochs']:,} epochs of {SAMPLES:,} samples of 64 KiB in all jobs together, "
            "each checked for missing, repeated and wrong samples. "
            + ", ".join(f"{count} x {what}" for what, count in sorted(done.items()))
            + f". Sampled once per second; the first {warm / 60:g} minutes are left out. Quarters are medians; growth "
            "is the median of the slopes between all pairs of quiet moments, over the median; one is the last "
            "third of the time between two events. Memory is anonymous and shared memory, each shared page counted "
            "once (`Pss_Anon` and `Pss_Shmem` of `smaps_rollup`); pages of files, such as libraries, are in RSS only. "
            "Shared memory is what `/dev/shm` has in use beyond the start.",
        ],
        versions=found.pop("versions"),
        raw=found,
    )


_SHOWN = {
    "memory": ("memory, MiB", _MIB),
    "rss": ("resident sizes (RSS), MiB", _MIB),
    "descriptors": ("descriptors", 1),
    "threads": ("threads", 1),
    "shm": ("shared memory, MiB", _MIB),
}


def _kind(event: str) -> str:
    """What happened, without the job's number."""
    return " ".join(word for word in event.split() if not word.isdigit())


def _after(found: Json, what: str, warm: float) -> tuple[Any, Any]:
    """Seconds and values of a series after the start."""
    at, values = np.array(found["seconds"]), np.array(found["total"][what], float)
    return at[at >= warm], values[at >= warm]


def quarters(found: Json, what: str, warm: float) -> list[float]:
    """The median of each quarter."""
    return [float(np.median(part)) for part in np.array_split(_after(found, what, warm)[1], 4)]


def growth(found: Json, what: str, warm: float) -> float:
    """Percent per hour: the median of the slopes between all pairs of quiet moments, over the median.

    A quiet moment is the last third of the time between two events: what was disturbed has settled.
    """
    at, values = _after(found, what, warm)
    events = [moment for moment, did in found["events"] if moment >= warm and not did.endswith("joins")]
    times, medians = [], []
    for before, event in pairwise(events):
        quiet = (at > event - (event - before) / 3) & (at < event)
        if quiet.any():
            times.append(event)
            medians.append(float(np.median(values[quiet])))
    first, second = np.triu_indices(len(times), 1)
    slopes = (np.array(medians)[second] - np.array(medians)[first]) / (np.array(times)[second] - np.array(times)[first])
    middle = float(np.median(values))
    return 100 * 3600 * float(np.median(slopes)) / middle if middle else 0.0


def chart(found: Json) -> str:
    """Memory, descriptors, threads and shared memory over time, as an SVG."""
    drawing: Any = runpy.run_path(str(ROOT / "docs" / "pictures" / "draw.py"))
    shown = [what for what in _SHOWN if what != "rss"]
    minutes = max(1.0, found["seconds"][-1] / 60)
    picture = drawing["Picture"]("What six jobs take while some are killed, leave and join", 720, 40 + 90 * len(shown))
    for row, what in enumerate(shown):
        name, unit = _SHOWN[what]
        values = np.array(found["total"][what]) / unit
        top, base = float(values.max()), 100 + 90 * row
        points = [
            drawing["Point"](150 + 540 * at / 60 / minutes, base - 70 * float(value) / top)
            for at, value in zip(found["seconds"], values, strict=True)
        ]
        picture.parts.append(f'<path d="M150 {base}H690" class="none"/>')
        picture.curve(points, "curve")
        picture.text((140, base - 42), name.split(",")[0], "end small")
        picture.text((140, base - 24), f"{np.median(values):,.0f}" + (" MiB" if unit > 1 else ""), "end small faint")
    base = 100 + 90 * (len(shown) - 1)
    for minute in np.linspace(0, minutes, 7).round(1):
        picture.text((150 + 540 * minute / minutes, base + 20), f"{minute:g}", "mid small")
    picture.text((150, 18), "minutes; each scale begins at 0", "start small faint")
    return str(picture.svg())


def child() -> None:
    given = json.loads(sys.argv[1])
    if given["what"] == "job":
        job(given)
        return
    emit(soak(given), stallfree=version("stallfree"), torch=torch.__version__, numpy=np.__version__)


if __name__ == "__main__":
    child()
