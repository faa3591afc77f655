"""Jobs join and leave a group while jobs, workers and the coordinator are killed or stopped at random.

Each job writes a ledger, batch by batch, so that the lines of a killed job remain. It has one line (turn, the group's
epoch, place, id, checksum, seconds) for each sample yielded. The expected lines are computed without a loader.
"""

import contextlib
import ctypes
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from group_jobs import Pictures, children_of, expected, loader, taken

from children import Child, until
from stallfree.ipc.folders import default_root, sweep
from stallfree.loader import executors as worker_processes
from stallfree.shared import member

COUNT = 100  # no multiple of a batch of 8 or more
BATCH_SIZES = (2, 4, 8, 8, 16)
STILL_SECONDS = 60.0  # no job may stand still for longer, on a busy machine either
MOST_JOBS = 4
SET_CHILD_SUBREAPER = 36


def run(folder: Path, number: int, arguments: dict[str, Any]) -> None:
    """Iterate until the file `stop` exists; sometimes break out of an epoch, or leave permanently."""
    chance = random.Random(number)
    ledger = os.open(folder / f"ledger-{number}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    turn, parent = 0, os.getppid()
    with loader(**arguments) as job:
        while not (folder / "stop").exists() and os.getppid() == parent:
            last = chance.randrange(20) if chance.random() < 0.15 else -1
            for place, batch in enumerate(job):
                now, seen = time.monotonic(), taken(job, batch)
                samples = zip(seen.ids, seen.sums, strict=True)
                lines = [f"{turn} {seen.epoch} {place} {id} {total} {now}\n" for id, total in samples]
                os.write(ledger, "".join(lines).encode())
                time.sleep(chance.random() * 0.002)  # the training step
                if place == last:
                    break
            else:
                os.write(ledger, f"{turn} whole\n".encode())
            turn += 1
            if last >= 0 and chance.random() < 0.3:
                break


def check(text: str) -> Counter[str]:
    """Assert that the samples are right, complete epochs have each id once, others none twice, and no epoch repeats.

    The last line of a killed job may be incomplete.
    """
    turns: dict[int, dict[int, int]] = {}  # the epoch of each id
    whole: set[int] = set()
    for line in text[: text.rfind("\n") + 1].splitlines():
        turn, *values = line.split()
        served = turns.setdefault(int(turn), {})
        if values == ["whole"]:
            whole.add(int(turn))
            continue
        epoch, id, total = int(values[0]), int(values[2]), int(values[3])
        assert total == expected(epoch, id), f"a wrong sample: {line}"
        assert id not in served, f"a sample comes again: {line}"
        served[id] = epoch
    latest, counts = -1, Counter[str]()
    for number, served in turns.items():
        (epoch,) = set(served.values())
        assert epoch > latest, f"turn {number} is epoch {epoch} after {latest}"
        latest = epoch
        assert number not in whole or len(served) == COUNT, f"turn {number}, epoch {epoch}: samples are lost"
        counts += Counter({"whole" if number in whole else "broken": 1, "samples": len(served)})
    return counts


def test_the_check_finds_what_is_wrong() -> None:
    def ledger(ids: list[int], epoch: int = 2) -> str:
        return "".join(f"0 {epoch} 0 {id} {expected(epoch, id)} 0.0\n" for id in ids)

    everything = list(range(COUNT))
    assert check(ledger(everything) + "0 whole\n") == {"whole": 1, "samples": COUNT}
    assert check(ledger(everything[:5]) + "0 2 0 99 12") == {"broken": 1, "samples": 5}
    for wrong in (
        ledger(everything[1:]) + "0 whole\n",  # lost
        ledger([*everything, 4]) + "0 whole\n",  # repeated
        ledger([1, 2, 1]),  # repeated in an epoch that was not finished
        ledger([1]).replace(str(expected(2, 1)), "17"),  # other bytes
        ledger([1]).replace("0 2 0", "0 3 0"),  # the noise of another epoch
        ledger([1]) + ledger([2], epoch=3),  # a batch of another epoch
        ledger([1]) + ledger([1]).replace("0 2 0", "1 2 0"),  # an epoch that comes again
    ):
        with pytest.raises((AssertionError, ValueError)):
            check(wrong)


@dataclass
class Running:
    number: int
    child: Child
    ledger: Path
    moved: float
    size: int = 0
    ended: bool = False


class Chaos:
    """Starts jobs, kills and stops processes, and checks that each job makes progress."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.dataset = Pictures(folder / "decodes", COUNT, seconds=0.0005)
        self.jobs: list[Running] = []
        self.done: Counter[str] = Counter()
        self.longest = 0.0

    @property
    def living(self) -> list[Running]:
        return [job for job in self.jobs if not job.ended]

    def join(self) -> None:
        number = len(self.jobs)
        sizes = {"batch_size": self.chance.choice(BATCH_SIZES), "num_workers": self.chance.choice((1, 2, 3))}
        child = Child(run, self.folder, number, {"dataset": self.dataset, **sizes})
        self.jobs.append(Running(number, child, self.folder / f"ledger-{number}", time.monotonic()))
        self.done["join"] += 1

    def watch(self) -> None:
        """Fail if a job has ended in an error or makes no progress."""
        for job in self.living:
            gone, status = os.waitpid(job.child.pid, os.WNOHANG)
            if gone:
                job.ended = True
                assert os.waitstatus_to_exitcode(status) == 0, f"job {job.number} ended: see its traceback"
                self.done["left"] += 1
                continue
            size, now = job.ledger.stat().st_size if job.ledger.exists() else 0, time.monotonic()
            if size != job.size:
                job.size, job.moved = size, now
            self.longest = max(self.longest, now - job.moved)
            if now - job.moved > STILL_SECONDS:
                job.child.signal(signal.SIGABRT)  # pytest's faulthandler writes the stacks of its threads
                pytest.fail(f"job {job.number} has stood still for {STILL_SECONDS:.0f} s after {dict(self.done)}")

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.watch()
            time.sleep(min(left, 0.003))

    def signal(self, role: str, number: int) -> psutil.Process:
        """Send a signal to a process of the given role, as soon as there is one."""

        def sent() -> psutil.Process | None:
            self.watch()
            self.fill(2)
            job = self.chance.choice(self.living)
            with contextlib.suppress(psutil.Error, IndexError):  # none of the role
                process = self.one_of(role, job)
                process.send_signal(number)
                if role == "job" and number == signal.SIGKILL:
                    os.waitpid(job.child.pid, 0)
                    job.ended = True
                return process
            return None

        return until(sent, f"there is a {role}")

    def one_of(self, role: str, job: Running) -> psutil.Process:
        """Return a process of the given role: `job`, or one of its children or grandchildren."""
        if role == "job":
            return psutil.Process(job.child.pid)
        found = children_of(psutil.Process(job.child.pid))
        if role == "worker":
            found = [worker for coordinator in found for worker in children_of(coordinator)]
        return self.chance.choice(found)

    def fill(self, least: int) -> None:
        while len(self.living) < least:
            self.join()

    def halt(self) -> None:
        process = self.signal(self.chance.choice(("job", "coordinator", "worker")), signal.SIGSTOP)
        self.wait(self.chance.random() * 0.3)
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)
        self.done["halt"] += 1

    def rage(self, kills: int) -> None:
        """Kill processes of each role at random instants, and start new jobs."""
        roles = ["job", "coordinator", "worker"] * -(-kills // 3)
        self.chance.shuffle(roles)
        for role in roles[:kills]:
            self.fill(self.chance.randint(1, MOST_JOBS))
            if self.chance.random() < 0.8:  # else right after what was before
                self.wait(self.chance.expovariate(1 / 0.06))
            if self.chance.random() < 0.15:
                self.halt()
            self.signal(role, signal.SIGKILL)
            self.done[role] += 1

    def calm(self) -> None:
        self.fill(1)
        self.wait(0.1)
        (self.folder / "stop").touch()
        while self.living:
            self.watch()
            time.sleep(0.003)

    def end(self) -> None:
        for job in self.living:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                job.child.signal(signal.SIGCONT)
                job.child.kill()


@pytest.mark.parametrize(
    ("kills", "seed"), [(6, 5), *(pytest.param(150, seed, marks=pytest.mark.slow) for seed in range(2))]
)
def test_chaos(kills: int, seed: int, tmp_path: Path, store_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "LIVES", 1000)  # chance may hit one batch again and again
    monkeypatch.setattr(member, "LIVES", 1000)  # or one coordinator after the other
    chaos, prctl = Chaos(tmp_path, random.Random(seed)), ctypes.CDLL(None).prctl
    prctl(SET_CHILD_SUBREAPER, 1)  # this process gets the orphans
    try:
        chaos.rage(kills)
        chaos.calm()
    finally:
        print(f"seed {seed}: {dict(chaos.done)}, longest standstill {chaos.longest:.2f} s")
        chaos.end()
    until(lambda: not children_of(psutil.Process()), "no processes are left")
    prctl(SET_CHILD_SUBREAPER, 0)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    total = sum((check(job.ledger.read_text()) for job in chaos.jobs if job.ledger.exists()), Counter[str]())
    print(f"ledgers: {dict(total)}")
    assert total["samples"] > COUNT  # there was something to be checked
    assert min(chaos.done[role] for role in ("job", "coordinator", "worker")) >= kills // 3
    sweep(default_root())  # killed coordinators leave their rings
    assert not list(store_root.iterdir())
