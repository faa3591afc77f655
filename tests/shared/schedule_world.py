"""A simulation around a `Schedule`: jobs that behave like `SharedLoader`, delayed messages and few slots.

It tracks the batches that each job needs and holds by the documented rules, and compares them after every message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from stallfree.shared.protocol import Kind
from stallfree.shared.schedule import Answer, Schedule


@dataclass
class Job:
    """A consumer at its end of the connection. It requests batches in order, one ahead of the last one taken.

    Attributes:
        name: a number.
        catchup: how it joins.
        chunks: batches that it takes of an epoch, from the first on; fewer than there are with `drop_last`.
        epoch: that it is in, or will begin; -1 before it was let in.
        at: number of the batch that it needs next from the group.
        got: batches of this epoch that it has.
        gaps: numbers of this epoch that it must prepare itself.
        held: batches whose memory it uses.
        seat: its number at the coordinator, or None if it has to introduce itself.
        outbox: what it said and the coordinator has not heard.
        inbox: what the coordinator said and it has not read.
    """

    name: int
    catchup: bool
    chunks: int
    epoch: int = -1
    inside: bool = False
    at: int = -1
    asked: int | None = None
    serial: int = 0
    taken: int = -1
    position: int | None = None
    got: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    seat: int | None = None
    finished: list[int] = field(default_factory=list)
    alone: int = 0
    outbox: deque[tuple[str, int, int]] = field(default_factory=deque)
    inbox: deque[Answer | int] = field(default_factory=deque)


@dataclass
class Seat:
    """The expected state of a job at the coordinator: a model separate from that of the schedule.

    Attributes:
        need: it needs this batch, and those after it.
        asked: batch that it waits for, and the serial.
        holds: batches that it was given and has not let go of.
        away: left behind in this epoch.
        excused: may be told to prepare something alone.
    """

    job: Job
    need: int
    excused: bool
    asked: tuple[int, int] | None = None
    holds: set[int] = field(default_factory=set)
    away: bool = False


class World:
    """All possible events as methods; each does nothing if the event cannot happen now.

    Args:
        batches: of an epoch.
        ahead: batches under way.
        slots: of the ring.
    """

    def __init__(self, batches: int, ahead: int, slots: int) -> None:
        self.batches, self.ahead, self.slots = batches, ahead, slots
        self.jobs: list[Job] = []
        self.started = 0
        self.noted = -1  # the last epoch of which a batch was started
        self._names = self._seats = 0
        self._new_coordinator()

    def _new_coordinator(self) -> None:
        self.schedule = Schedule(self.batches, self.ahead)
        self.going = False
        self.seats: dict[int, Seat] = {}
        self.tasks: list[int] = []
        self.ready: set[int] = set()
        self.next = -1  # the lowest number that may still be started
        self.last_asked = -1

    # -- what jobs do -------------------------------------------------------------------------------------------------

    def come(self, catchup: bool, missing: int = 0) -> Job:
        """Add a job, which drops the last `missing` batches of each epoch."""
        self._names += 1
        job = Job(self._names, catchup, max(0, self.batches - missing))
        self.jobs.append(job)
        self._greet(job)
        return job

    def resume(self, position: int) -> Job:
        """Add a job that resumes: it needs the batch at `position` next, and has those before it."""
        self._names += 1
        job = Job(self._names, False, self.batches)
        self._set_out(job, position // self.batches)
        job.got = list(range(job.at, position))
        job.inside, job.at, job.position = True, position, position
        self.jobs.append(job)
        self._greet(job)
        return job

    def _greet(self, job: Job) -> None:
        self._seats += 1
        job.seat = self._seats
        job.asked, job.serial = None, job.serial + 1
        job.outbox.append(("hello", -1 if job.position is None else job.position, 0))

    def move(self, job: Job) -> bool:
        """Perform the next action of a job; returns whether there was one."""
        if job.seat is None and (not job.inside or job.at < self._end(job)):
            self._greet(job)
            return True
        if not job.inside:
            return self._begin_epoch(job)
        if job.at < self._end(job):
            return self._read(job)
        if job.serial >= 0 and job.position is not None and job.position < (job.epoch + 1) * self.batches:
            self._skip(job)  # then it prepares alone what it lacks, while the others go on
            return True
        return self._finish_epoch(job)

    def _end(self, job: Job) -> int:
        return job.epoch * self.batches + job.chunks

    def _begin_epoch(self, job: Job) -> bool:
        if job.epoch < 0:  # it waits to be let in
            if not job.inbox:
                return False
            told = job.inbox.popleft()
            assert isinstance(told, int)
            job.epoch = told
        job.inside = True
        self._set_out(job, job.epoch)
        return True

    def _set_out(self, job: Job, epoch: int) -> None:
        job.epoch, job.at = epoch, epoch * self.batches
        job.got, job.gaps = [], []
        job.position = job.at

    def _read(self, job: Job) -> bool:
        if job.asked != job.at:
            self._ask(job, job.at)
            return True
        if not job.inbox:
            return False
        told = job.inbox.popleft()
        if isinstance(told, int) or told.serial != job.serial:
            return True  # of another time
        if told.kind == Kind.BATCH:
            assert told.number == job.at
            job.got.append(told.number)
            job.held.add(told.number)
            job.asked, job.taken, job.at = None, told.number, told.number + 1
            job.position = job.at
            if job.at < self._end(job):
                self._ask(job, job.at)
        elif told.kind == Kind.SKIPPED:
            assert told.number > job.at
            start = min(told.number, self._end(job))
            job.gaps += range(job.at, start)
            job.asked, job.at = None, start
            job.position = start
        else:
            assert told.number > job.epoch
            assert not job.got
            assert not job.gaps
            job.asked = None
            self._set_out(job, told.number)
        return True

    def _ask(self, job: Job, number: int) -> None:
        job.asked = number
        job.outbox.append(("ask", number, job.serial))

    def _skip(self, job: Job) -> None:
        job.serial += 1
        job.asked = None
        job.position = (job.epoch + 1) * self.batches
        if job.seat is not None:
            job.outbox.append(("skip", job.position, job.taken))

    def _finish_epoch(self, job: Job) -> bool:
        first = job.epoch * self.batches
        assert sorted(job.got + job.gaps) == list(range(first, first + job.chunks))
        job.alone += len(job.gaps)
        job.finished.append(job.epoch)
        job.epoch, job.inside = job.epoch + 1, False
        return True

    def break_off(self, job: Job) -> None:
        """The job leaves the epoch, and will begin another one."""
        if not job.inside:
            return
        assert len(set(job.got + job.gaps)) == len(job.got + job.gaps)
        if job.position is None or job.position < (job.epoch + 1) * self.batches:
            self._skip(job)
        job.epoch, job.inside = job.epoch + 1, False

    def let_go(self, job: Job, which: int) -> None:
        """The job frees one of the batches that it holds."""
        if job.held:
            number = sorted(job.held)[which % len(job.held)]
            job.held.remove(number)
            job.outbox.append(("release", number, 0))

    def leave(self, job: Job) -> None:
        """The job leaves or dies; its earlier messages may or may not arrive."""
        self.jobs.remove(job)
        if job.seat is not None and self.seats.pop(job.seat, None) is not None:
            self._free(self.schedule.leave(job.seat))
        self.check()

    # -- what the coordinator does ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The coordinator begins once a job is present; other jobs may still reconnect."""
        if not self.going and any(job.seat in self.seats or job.outbox for job in self.jobs if job.seat):
            self.going = True
            low = min((seat.need for seat in self.seats.values()), default=(self.noted + 1) * self.batches)
            self.schedule.begin(self.noted + 1)
            self.next, self.last_asked = low, max(self.last_asked, low - 1)

    def hear(self, job: Job) -> bool:
        """The coordinator handles one message of a job; returns whether there was one that it can answer."""
        if not job.outbox or (job.outbox[0][:2] == ("hello", -1) and not self.going):
            return False
        kind, number, other = job.outbox.popleft()
        assert job.seat is not None
        if kind == "hello":
            self._let_in(job, None if number < 0 else number)
        elif kind == "ask":
            self._answer(job.seat, number, serial=other)
        elif kind == "skip":
            seat = self.seats[job.seat]
            seat.asked, seat.need = None, max(seat.need, number)
            seat.holds = {held for held in seat.holds if held <= other or held not in self._unread(seat)}
            self._free(self.schedule.skip(job.seat, number, other))
        else:
            self.seats[job.seat].holds.discard(number)
            self._free(self.schedule.release(job.seat, number))
        self.check()
        return True

    def _unread(self, seat: Seat) -> set[int]:
        """Return the batches that were granted to a job and not taken by it."""
        return seat.holds - seat.job.held - {n for kind, n, _ in seat.job.outbox if kind == "release"}

    def _let_in(self, job: Job, position: int | None) -> None:
        assert job.seat is not None
        under_way = self._under_way()
        epoch = self.schedule.join(job.seat, position=position, catchup=job.catchup)
        if position is None:
            first = epoch * self.batches
            served = self._served(first)
            end = first + self.batches
            assert served == first or (job.catchup and served < end), "it would have to do alone what it need not"
            assert under_way <= epoch <= under_way + 1
            if epoch > under_way:  # because that one cannot be had
                served = self._served(first - self.batches)
                assert served >= first if job.catchup else served > first - self.batches
            position = first
            job.inbox.append(epoch)
        else:
            self.last_asked = max(self.last_asked, position - 1)
        need = self._served(position)
        self.seats[job.seat] = Seat(job, need, excused=need > position)

    def _under_way(self) -> int:
        """Return the epoch of the slowest attached jobs."""
        needs = [seat.need for seat in self.seats.values() if not seat.away]
        return min([*needs, self.last_asked]) // self.batches

    def _served(self, number: int) -> int:
        """Return the first number, at least `number`, from which on all batches are ready or still to be prepared."""
        gone = [n for n in range(number, max(self.next, number)) if n not in self.ready and n not in self.tasks]
        return max(gone, default=number - 1) + 1

    def _answer(self, number: int, wanted: int, serial: int) -> None:
        seat = self.seats[number]
        told = self.schedule.request(number, serial, wanted)
        end = (wanted // self.batches + 1) * self.batches
        first = self._served(wanted)
        if wanted % self.batches == 0:
            seat.away = False
        if seat.away:
            assert told == Answer(Kind.SKIPPED, number, serial, end)
            seat.excused = True
        elif told is not None and told.kind == Kind.EPOCH_ADVANCED:
            assert seat.excused
            assert wanted % self.batches == 0
            assert first >= end, "it could have had some of that epoch"
            seat.need = self._served(told.number * self.batches)
            assert seat.need < (told.number + 1) * self.batches
        elif first > wanted:
            assert seat.excused, "it is told to prepare alone what it was to get"
            assert told == Answer(Kind.SKIPPED, number, serial, min(first, end))
            seat.need = first
        else:
            seat.excused = seat.excused and wanted % self.batches != 0
            seat.need, seat.asked = wanted, (wanted, serial)
            self.last_asked = max(self.last_asked, wanted)
            assert (told is not None) == (wanted in self.ready)
        if told is not None:
            self._send(told)
        if told is None or told.kind != Kind.BATCH:
            self._free(self.schedule.free())

    def _send(self, told: Answer) -> None:
        seat = self.seats[told.member]
        if told.kind == Kind.BATCH:
            assert seat.asked == (told.number, told.serial)
            assert told.number in self.ready, "a batch of a slot that is not its own"
            seat.asked, seat.need = None, told.number + 1
            seat.holds.add(told.number)
        seat.job.inbox.append(told)

    def start(self) -> bool:
        """Start the next batch if there is room; returns whether one was started."""
        number = self.schedule.next_to_start() if self.going else None
        if number is None or len(self.tasks) >= self.ahead or len(self.tasks) + len(self.ready) >= self.slots:
            return False
        self._start(number)
        return True

    def _start(self, number: int) -> None:
        assert number >= self.next, "a batch is prepared twice"
        assert number < self.last_asked + self.ahead
        assert number // self.batches <= self.last_asked // self.batches
        needed = [seat.need for seat in self.seats.values() if not seat.away]
        assert min(needed) <= number, "nobody needs it"
        assert self.next == number or min(needed) == number, "one is left out that somebody needs"
        self.schedule.start(number)
        self.started += 1
        self.next = number + 1
        self.noted = max(self.noted, number // self.batches)
        self.tasks.append(number)
        self.check()

    def finish(self, which: int) -> bool:
        """Finish one of the batches in preparation; returns whether there was one."""
        if not self.tasks:
            return False
        number = self.tasks.pop(which % len(self.tasks))
        self.ready.add(number)
        waiting = {n for n, seat in self.seats.items() if seat.asked is not None and seat.asked[0] == number}
        told, freed = self.schedule.finish(number)
        assert {answer.member for answer in told} == waiting
        assert len(told) == len(waiting)
        for answer in told:
            self._send(answer)
        self._free(freed)
        self.check()
        return True

    def make_room(self) -> bool:
        """Detach laggards that block the others; returns whether anything was done."""
        if not self.blocked or not self.going:
            return False
        laggards = self.schedule.laggards()
        for number in laggards:
            seat = self.seats[number]
            assert not seat.away
            assert seat.asked is None
            assert seat.need == min(other.need for other in self.seats.values() if not other.away)
            seat.away = seat.excused = True
            self._free(self.schedule.detach(number))
        coming = self.schedule.next_to_start()
        if not laggards and coming is not None:
            self._start(coming)
        self.check()
        return bool(laggards) or coming is not None

    @property
    def blocked(self) -> bool:
        """Return whether a job waits, nothing is in preparation and no slot is free."""
        hungry = any(seat.asked is not None for seat in self.seats.values())
        assert self.schedule.has_waiting == hungry
        return hungry and not self.tasks and len(self.ready) >= self.slots

    def _wanted(self) -> set[int]:
        """Return the ready batches that a job holds or needs."""
        low = min((seat.need for seat in self.seats.values() if not seat.away), default=None)
        held = {number for seat in self.seats.values() for number in seat.holds}
        return {number for number in self.ready if number in held or (low is not None and number >= low)}

    def _free(self, numbers: list[int]) -> None:
        assert not self._wanted() & set(numbers), "slots are freed that somebody holds or needs"
        for number in numbers:
            assert number in self.ready, "a slot is freed twice, or while it is filled"
            self.ready.remove(number)
            for job in self.jobs:
                if job.seat in self.seats:
                    assert number not in job.held, "a job uses it"
                    assert not any(told == Answer(Kind.BATCH, job.seat, job.serial, number) for told in job.inbox), (
                        "it is on its way to a job"
                    )

    def die(self) -> None:
        """The coordinator dies and is replaced; messages in flight are lost."""
        self._new_coordinator()
        for job in self.jobs:
            job.seat = None
            job.inbox.clear()
            job.outbox.clear()
            job.held.clear()  # which stays valid, but is nobody's slot any more

    # -- what must hold at any time -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the invariants after each event."""
        assert self._wanted() == self.ready, "slots are kept that nobody holds or needs"
        if not self.going:
            return
        hungry = any(seat.asked is not None for seat in self.seats.values())
        assert self.schedule.has_waiting == hungry
        assert self.schedule.epoch == self.last_asked // self.batches
        if hungry and not self.tasks:
            assert self.schedule.next_to_start() is not None, "all wait for something that nobody prepares"
        held = {number for seat in self.seats.values() for number in seat.holds}
        if self.blocked and self.ready - held:
            assert self.schedule.laggards(), "slots are kept, and nobody is to blame"

    def run(self, epochs: int) -> None:
        """Run without further faults until each job has finished more epochs; no job may wait forever."""
        goals = {job.name: len(job.finished) + epochs for job in self.jobs}
        self.begin()
        for _ in range(200 * (epochs + 1) * self.batches * (len(self.jobs) + 1)):
            if all(len(job.finished) >= goals[job.name] for job in self.jobs):
                return
            moved = False
            for job in self.jobs:
                moved |= self.hear(job) or self.move(job)
                while job.held:
                    self.let_go(job, 0)
            self.begin()
            moved |= self.start() or self.finish(0)
            if not moved:
                assert self.make_room(), f"all stand still: {self.jobs}"
        raise AssertionError(f"some do not come to an end: {self.jobs}")
