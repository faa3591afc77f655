"""The schedule of a group against a model: each member gets each of its batches once, in order, and all go on."""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree.shared.schedule import Entry, Schedule

BATCHES = 5


@dataclass
class Job:
    """A job of the model: the batch it takes next, what it holds, and whether a request is open."""

    next: int
    open: bool = False
    held: list[int] = field(default_factory=list)


class Model:
    """A group whose ring has some slots, driven step by step. A task is a batch's number. Checks what steps return."""

    def __init__(self, seed: int, slots: int) -> None:
        self.draw = random.Random(seed)
        self.schedule, self.slots = Schedule(BATCHES, 3), slots
        self.jobs: dict[int, Job] = {}
        self.preparing: set[int] = set()
        self.ready: set[int] = set()
        self.made: list[int] = []
        self.dropped: set[int] = set()
        self.keys = 0

    def join(self) -> None:
        self.keys += 1
        first = self.schedule.epoch * BATCHES
        self.schedule.join(self.keys, first)
        for number in range(first, first + BATCHES):  # nothing of this epoch is gone
            assert number in self.ready | self.preparing or number not in self.made
        self.jobs[self.keys] = Job(first)

    def resume(self) -> None:
        """Let a job begin in the middle of the epoch of the slowest one."""
        low = min(job.next for job in self.jobs.values())
        self.keys += 1
        first = low // BATCHES * BATCHES + self.draw.randrange(BATCHES)
        assert not self.schedule.is_behind(first)
        self.schedule.join(self.keys, first)
        self.jobs[self.keys] = Job(first)
        self.dropped |= set(self.made) - self.ready - self.preparing  # those may be made again for it

    def request(self, key: int) -> None:
        job = self.jobs[key]
        job.open = True
        if self.schedule.request(key, job.next):
            self.grant(key, job.next)
        self.free(self.schedule.free())

    def grant(self, key: int, number: int) -> None:
        job = self.jobs[key]
        assert job.open
        assert number == job.next
        assert number in self.ready
        job.open, job.next = False, number + 1
        job.held.append(number)

    def free(self, entries: list[Entry]) -> None:
        for number in (entry.task for entry in entries):
            assert number in self.ready
            assert not any(number in job.held for job in self.jobs.values())
            self.ready.remove(number)

    def step(self) -> None:
        number = self.schedule.next_to_start()
        room = len(self.ready) + len(self.preparing) < self.slots
        if number is not None and not room and not self.preparing and (lost := self.schedule.drop_one()):
            assert number < lost[0].task
            self.dropped.update(entry.task for entry in lost)
            self.free(lost)
            room = True
        if number is not None and room and self.draw.random() < 0.6:
            number = self.schedule.next_to_start()
            assert number is not None
            assert number not in self.preparing | self.ready
            assert number not in self.made or number in self.dropped, "a batch is prepared once"
            assert any(job.next <= number for job in self.jobs.values())
            self.schedule.start(number, number)
            self.preparing.add(number)
        elif self.preparing and self.draw.random() < 0.7:
            number = self.draw.choice(sorted(self.preparing))
            self.preparing.remove(number)
            self.ready.add(number)
            self.made.append(number)
            granted, freed = self.schedule.finish(number, 0, b"")
            for key in granted:
                self.grant(key, number)
            self.free(freed)
        elif self.jobs:
            self.act(self.draw.choice(sorted(self.jobs)))

    def act(self, key: int) -> None:
        job = self.jobs[key]
        if job.held and self.draw.random() < 0.7:
            self.free(self.schedule.release(key, job.held.pop(0)))
        elif not job.open and self.draw.random() < 0.02:
            self.skip(key)
        elif not job.open:
            self.request(key)

    def skip(self, key: int) -> None:
        """Let a job break off its epoch; it keeps what it holds."""
        job = self.jobs[key]
        job.next = -(-(job.next + 1) // BATCHES) * BATCHES
        assert not self.schedule.request(key, job.next, waits=False)
        self.free(self.schedule.free())

    def leave(self, key: int) -> None:
        del self.jobs[key]
        self.free(self.schedule.leave(key))
        assert self.jobs or not self.ready


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), slots=st.integers(6, 14), joins=st.integers(1, 5), leaves=st.booleans())
def test_all_members_get_all_batches_once(seed: int, slots: int, joins: int, leaves: bool) -> None:
    model = Model(seed, slots)
    for step in range(600):
        if step % 60 == 0 and len(model.jobs) < joins:
            model.resume() if model.jobs and model.draw.random() < 0.3 else model.join()
        if leaves and len(model.jobs) > 1 and model.draw.random() < 0.02:
            model.leave(model.draw.choice(sorted(model.jobs)))
        before = {key: job.next for key, job in model.jobs.items()}
        model.step()
        for key, job in model.jobs.items():  # one batch after the other, or the next epoch
            assert job.next - before[key] in (0, 1) or job.next % BATCHES == 0


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), jobs=st.integers(1, 4))
def test_nobody_waits_for_ever(seed: int, jobs: int) -> None:
    model = Model(seed, slots=6)
    for _ in range(jobs):
        model.join()
    for step in range(5000):
        if step % 50 == 25 and len(model.jobs) < 6:
            model.resume()
        model.step()
        if all(job.next >= 3 * BATCHES for job in model.jobs.values()):
            return
    raise AssertionError(f"no progress: {model.jobs}")
