"""Jobs act on a schedule at random: each gets all of its epochs, and no slot is lost or freed early."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from schedule_world import Job, World


def walk(seed: int, steps: int = 400) -> World:
    """Jobs join, leave, lag, break and resume, and coordinators die; then all jobs run to the end."""
    chance = random.Random(seed)
    world = World(chance.choice([1, 2, 3, 5, 12]), chance.randint(1, 5), chance.randint(2, 9))
    favourite = chance.random()
    events: dict[str, float] = {
        "move": 35, "hear": 25, "let_go": 10, "break_off": 1, "leave": 1, "die": 0.4, "begin": 3, "start": 11,
        "finish": 11, "make_room": chance.choice([0, 0.2, 3]), "come": 3,
    }  # fmt: skip
    for event in chance.choices(list(events), list(events.values()), k=steps):
        if not world.jobs or event == "come":
            if len(world.jobs) < 5 and chance.random() < 0.2:
                world.resume(chance.randrange((world.noted + 3) * world.batches))
            elif len(world.jobs) < 5:
                world.come(chance.random() < 0.5, chance.choice([0, 0, 0, 1, world.batches]))
            continue
        job = world.jobs[0] if chance.random() < favourite / 2 else chance.choice(world.jobs)
        happen(world, event, job, chance.randrange(9))
    world.run(2)
    return world


def happen(world: World, event: str, job: Job, which: int) -> None:
    if event in ("begin", "start", "make_room", "die"):
        getattr(world, event)()
    elif event == "finish":
        world.finish(which)
    elif event == "let_go":
        world.let_go(job, which)
    else:
        getattr(world, event)(job)


def test_random_walks() -> None:
    worlds = [walk(seed) for seed in range(100)]
    assert sum(len(job.finished) for world in worlds for job in world.jobs) > 1000
    assert sum(job.alone for world in worlds for job in world.jobs) > 50


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(20))
def test_long_random_walks(thousand: int) -> None:
    for seed in range(1000):
        walk(1_000_000 + 1000 * thousand + seed, 800)


@pytest.mark.parametrize(("count", "slots"), [(1, 2), (2, 20), (5, 4)])
def test_jobs_that_keep_step_prepare_nothing_alone(count: int, slots: int) -> None:
    world = World(7, 2, slots)
    jobs = [world.come(False) for _ in range(count)]
    world.run(3)
    assert world.started == 7 * max(len(job.finished) for job in jobs)
    assert all(job.alone == 0 for job in jobs)
    assert all(job.finished == list(range(len(job.finished))) for job in jobs)


class Jobs(RuleBasedStateMachine):
    """The same simulation for Hypothesis, which finds a short sequence that fails."""

    @initialize(batches=st.sampled_from([1, 2, 5]), ahead=st.integers(1, 3), slots=st.integers(2, 5))
    def build(self, batches: int, ahead: int, slots: int) -> None:
        self.world = World(batches, ahead, slots)
        self.world.come(False)

    @precondition(lambda self: len(self.world.jobs) < 4)
    @rule(catchup=st.booleans(), missing=st.sampled_from([0, 0, 1]))
    def come(self, catchup: bool, missing: int) -> None:
        self.world.come(catchup, missing)

    @precondition(lambda self: len(self.world.jobs) < 4)
    @rule(position=st.integers(0, 20))
    def resume(self, position: int) -> None:
        self.world.resume(position)

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data(), event=st.sampled_from(["move", "hear", "let_go", "break_off", "leave"]))
    def act(self, data: st.DataObject, event: str) -> None:
        happen(self.world, event, data.draw(st.sampled_from(self.world.jobs)), 0)

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def hurry(self, data: st.DataObject) -> None:
        """One job runs ahead as far as possible."""
        job = data.draw(st.sampled_from(self.world.jobs))
        for _ in range(4 * self.world.batches):
            self.world.begin()
            self.world.hear(job) or self.world.move(job)
            self.world.let_go(job, 0)
            self.world.start()
            self.world.finish(0)

    @rule(event=st.sampled_from(["begin", "start", "make_room", "die"]))
    def conduct(self, event: str) -> None:
        getattr(self.world, event)()

    @rule(which=st.integers(0, 3))
    def finish(self, which: int) -> None:
        self.world.finish(which)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run(1)


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=20, stateful_step_count=40)
