"""Jobs of one group, each in a separate process, for the tests of `SharedLoader`.

A `Job` executes commands, batch by batch, so a test controls the position of each job. All processes of a job carry a
mark by which orphans are found: a memory mapping, which forks inherit, and an environment variable for other processes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import multiprocessing
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

import stallfree as sf
from children import Child
from loader_data import checksum, pixels
from stallfree.ipc.folders import default_root, sweep
from stallfree.pipeline.randomness import Randomness

PATIENCE = 60.0  # seconds until a job that does not answer is taken for hung
SAMPLES, BATCH = 160, 4
BATCHES = SAMPLES // BATCH
SEED, GROUP = 3, "team"
_MARK = "STALLFREE_TEST_TEAM"
_DECODE = struct.Struct("<II")


# --- data, and what they must be --------------------------------------------------------------------------------------


def noisy_pixels(id: int) -> torch.Tensor:
    """Return a picture with noise from torch's and Python's generator."""
    return pixels(id).float() + torch.rand(()) + random.random()


class Pictures:
    """A data set that logs each decode (process, id) to a file; sample `bad` cannot be read."""

    def __init__(self, book: Path, count: int = SAMPLES, bad: int = -1, seconds: float = 0.0) -> None:
        self.book, self.count, self.bad, self.seconds = book, count, bad, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
        if id == self.bad:
            raise ValueError(f"no picture {id}")
        book = os.open(self.book, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(book, _DECODE.pack(os.getpid(), id))
        os.close(book)
        time.sleep(self.seconds)
        return noisy_pixels(id), id

    def decodes(self) -> list[tuple[int, int]]:
        """Return (process, id) of each decode so far."""
        return list(_DECODE.iter_unpack(self.book.read_bytes())) if self.book.exists() else []


@lru_cache(maxsize=100_000)
def expected(epoch: int, id: int, seed: int = SEED) -> int:
    """Return the checksum of picture `id` in `epoch`, computed without a loader."""
    with Randomness(noisy_pixels) as randomness:
        randomness.seed(seed, epoch, id)
        return checksum(noisy_pixels(id))


class Taken(NamedTuple):
    """A batch that a job received: the group's epoch, the ids and their checksums."""

    epoch: int
    ids: list[int]
    sums: list[int]


def taken(loader: sf.SharedLoader, batch: sf.Batch) -> Taken:
    """Describe the batch that the job has just received."""
    images, labels = batch.data
    ids = batch.ids.tolist()
    assert labels.tolist() == ids
    return Taken(loader.epoch, ids, [checksum(image) for image in images])


def flat(batches: list[Taken]) -> list[int]:
    return [id for batch in batches for id in batch.ids]


def ids_of(batches: list[Taken]) -> list[list[int]]:
    return [batch.ids for batch in batches]


def right(batches: Iterable[Taken], ids: Iterable[int] = range(SAMPLES)) -> int:
    """Assert that the batches are one epoch with each of `ids` once and correct; returns the group's epoch."""
    batches = list(batches)
    (epoch,) = {batch.epoch for batch in batches}
    assert sorted(flat(batches)) == sorted(ids)
    for batch in batches:
        assert batch.sums == [expected(epoch, id) for id in batch.ids]
    return epoch


# --- jobs that do what they are told ----------------------------------------------------------------------------------


class Served:
    """The commands of a job: each method sends its return value as the answer."""

    def __init__(self, arguments: dict[str, Any], progress: mmap.mmap) -> None:
        self.loader = sf.SharedLoader(**arguments)
        self.iterator: Iterator[Any] | None = None
        self.batch: Any = None
        """The last batch. Held until the next one comes, as training loops do."""
        self._arguments, self._progress = arguments, progress

    def begin(self) -> None:
        """Start a new iteration without taking a batch."""
        self.iterator = None
        self.iterator = iter(self.loader)

    def take(self, count: int) -> list[Taken]:
        """Return the next batches; fewer at the end of the iteration."""
        if self.iterator is None:
            self.begin()
        batches: list[Taken] = []
        while len(batches) < count:
            assert self.iterator is not None
            try:
                self.batch = next(self.iterator)
            except StopIteration:
                self.iterator = None
                break
            batches.append(taken(self.loader, self.batch))
            (done,) = struct.unpack_from("<Q", self._progress)
            struct.pack_into("<Q", self._progress, 0, done + 1)
        return batches

    def rest(self) -> list[Taken]:
        return self.take(sys.maxsize)

    def epoch(self) -> list[Taken]:
        self.begin()
        return self.rest()

    def stats(self) -> sf.SharedStats:
        return self.loader.stats()

    def close(self) -> None:
        self.iterator = self.batch = None
        self.loader.close()

    def again(self) -> None:
        """Rejoin with a new loader."""
        self.loader = sf.SharedLoader(**self._arguments)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function of a test module, called with this object."""
        return function(self, *arguments)


class Job:
    """A forked job. `ask` sends it a command, `answer` waits for the result, `do` does both."""

    def __init__(self, team: Team, environment: dict[str, str], arguments: dict[str, Any]) -> None:
        self._team, self._asked, self.alive = team, 0, True
        self._progress = mmap.mmap(-1, mmap.PAGESIZE)
        self._connection, theirs = multiprocessing.Pipe()
        self._child = Child(self._serve, theirs, environment, arguments)
        self.pid, self.signal = self._child.pid, self._child.signal
        theirs.close()

    def _serve(self, connection: Any, environment: dict[str, str], arguments: dict[str, Any]) -> None:
        self._connection.close()
        os.environ.update(environment)
        parent = os.getppid()
        served = Served(arguments, self._progress)
        while os.getppid() == parent:
            if not connection.poll(1.0):
                continue
            name, given = connection.recv()
            if name == "end":
                break
            try:
                answer = getattr(served, name)(*given)
            except Exception as error:
                answer = error
            connection.send(answer)
        served.close()

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.pid)

    @property
    def progress(self) -> int:
        """Number of batches taken so far."""
        return int(struct.unpack_from("<Q", self._progress)[0])

    @property
    def busy(self) -> bool:
        """Whether an answer is still outstanding."""
        return self._asked > 0 and not self._connection.poll(0)

    def ask(self, name: str, *arguments: Any) -> None:
        self._connection.send((name, arguments))
        self._asked += 1

    def answer(self) -> Any:
        """Return the answer to the oldest outstanding `ask`; raises the exception of the job."""
        deadline = time.monotonic() + PATIENCE
        while not self._connection.poll(0.02):
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) and not self._connection.poll(0):
                pytest.fail(f"job {self.pid} ended without an answer")
            if time.monotonic() > deadline:
                pytest.fail(f"job {self.pid} has not answered for {PATIENCE:.0f} s\n{self._team.stacks()}")
        self._asked -= 1
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def do(self, name: str, *arguments: Any) -> Any:
        self.ask(name, *arguments)
        return self.answer()

    def begin(self) -> None:
        self.do("begin")

    def take(self, count: int) -> list[Taken]:
        batches: list[Taken] = self.do("take", count)
        assert len(batches) == count
        return batches

    def rest(self) -> Any:
        return self.do("rest")

    def epoch(self) -> Any:
        return self.do("epoch")

    def stats(self) -> Any:
        return self.do("stats")

    def end(self) -> None:
        """Make the job close its loader and end."""
        self._connection.send(("end", ()))
        code = self._child.wait()
        self._over()
        assert code == 0

    def kill(self) -> None:
        """Kill the job with SIGKILL, and wait until it has ended."""
        self._child.kill()
        self._over()

    def _over(self) -> None:
        self.alive = False
        self._connection.close()


class Team:
    """The jobs of a group and their processes. A context manager that fails if a process is left at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dataset = Pictures(folder / "decodes")
        self.members: list[Job] = []

    def __enter__(self) -> Team:
        path = self.folder / "marker"
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._mapping = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._mark = os.environ[_MARK] = str(path)
        self._stacks = (self.folder / "stacks").open("ab+", buffering=0)
        faulthandler.register(signal.SIGUSR2, self._stacks, all_threads=True)
        return self

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Return the arguments of a loader of this group."""
        return {
            "dataset": self.dataset, "group": GROUP, "batch_size": BATCH, "shuffle": True, "num_workers": 1,
            "seed": SEED, "with_ids": True, "multiprocessing_context": "fork", **changes,
        }  # fmt: skip

    def job(self, *, environment: dict[str, str] | None = None, **changes: Any) -> Job:
        """Add a job, which has not started yet."""
        job = Job(self, environment or {}, self.arguments(**changes))
        self.members.append(job)
        return job

    def jobs(self, count: int, **changes: Any) -> list[Job]:
        """Return jobs that have all joined and taken no batch; the first one has started the coordinator."""
        jobs = [self.job(**changes) for _ in range(count)]
        begun(jobs[:1])
        return [*jobs[:1], *begun(jobs[1:])]

    def processes(self) -> list[psutil.Process]:
        """Return all living processes that descend from this team, including orphans."""
        mark, processes = self._mark.encode(), []
        for pid in psutil.pids():
            here = Path(f"/proc/{pid}")
            with contextlib.suppress(OSError, psutil.Error):
                if pid != os.getpid() and (
                    mark in (here / "environ").read_bytes() or mark in (here / "maps").read_bytes()
                ):
                    processes.append(psutil.Process(pid))
        return processes

    def stacks(self) -> str:
        """Return the stacks of all threads of all processes, for the message of a test that hangs."""
        texts = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                cpu = sum(process.cpu_times()[:2])
                texts.append(f"--- {process.pid}, child of {process.ppid()}, {process.status()}, {cpu:.2f} s of CPU")
                if self._mark in Path(f"/proc/{process.pid}/maps").read_text():  # forked, so it has the handler
                    before = os.fstat(self._stacks.fileno()).st_size
                    process.send_signal(signal.SIGUSR2)
                    time.sleep(0.3)
                    texts.append(os.pread(self._stacks.fileno(), 1 << 20, before).decode(errors="replace"))
        return "\n".join(texts)

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                self.end()
        finally:
            for job in self.members:
                if job.alive:
                    job.kill()
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            faulthandler.unregister(signal.SIGUSR2)
            self._stacks.close()
            self._mapping.close()
            del os.environ[_MARK]

    def end(self) -> None:
        """End the jobs in order and assert that nothing is left; jobs that hang are killed."""
        for job in self.members:
            if job.alive:
                job.kill() if job.busy else job.end()
        self.all_gone()
        sweep(default_root())  # the files of killed processes

    def all_gone(self, but: Iterable[Job] = ()) -> None:
        """Assert that only these jobs are left, after each process has had time to end."""
        stay = {job.pid for job in but}
        deadline = time.monotonic() + PATIENCE / 2
        while left := [process for process in self.processes() if process.pid not in stay]:
            if time.monotonic() > deadline:
                pytest.fail(f"processes are left: {left}\n{self.stacks()}")
            time.sleep(0.005)


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """Return its living children."""
    return [child for child in process.children() if child.status() != psutil.STATUS_ZOMBIE]


def coordinator_of(*jobs: Job) -> psutil.Process:
    """Return the process that runs the workers, a child of one of the jobs."""
    (coordinator,) = [child for job in jobs for child in children_of(job.process)]
    return coordinator


def together(jobs: list[Job], name: str) -> list[list[Taken]]:
    """Run a command in all jobs at once; returns their answers."""
    for job in jobs:
        job.ask(name)  # ranks wait for one another
    return [job.answer() for job in jobs]


def begun(jobs: list[Job]) -> list[Job]:
    """Return the jobs after all have begun an epoch, before any takes a batch of it."""
    together(jobs, "begin")
    return jobs


def afresh(jobs: list[Job]) -> list[list[Taken]]:
    """Run an epoch that all jobs begin before any of them continues."""
    return together(begun(jobs), "rest")


def let_in(newcomer: Job, member: Job) -> list[Taken]:
    """Run an epoch of a newcomer, which then leaves, while the member runs as many epochs as that takes."""
    for name in ("epoch", "close"):
        newcomer.ask(name)
    while newcomer.busy:
        member.epoch()
    batches, _ = newcomer.answer(), newcomer.answer()
    return batches  # type: ignore[no-any-return]
