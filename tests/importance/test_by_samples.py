"""Schedules by samples, against torch's own stepped once per batch."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as lr

from stallfree.errors import InputError
from stallfree.importance.plans.schedule import BySamples

STEPS = 24
Make = Callable[[Optimizer], Any]

FALLING: dict[str, Make] = {
    "cosine": lambda o: lr.CosineAnnealingLR(o, STEPS),
    "multistep": lambda o: lr.MultiStepLR(o, [8, 16]),
    "exponential": lambda o: lr.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr.PolynomialLR(o, STEPS, power=2.0),
    "table": lambda o: lr.LambdaLR(o, [1 / (n + 1) for n in range(STEPS + 1)].__getitem__),  # takes whole numbers only
    "warm-up and cosine": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=4), lr.CosineAnnealingLR(o, STEPS - 4)], [4]
    ),
    "two together": lambda o: lr.ChainedScheduler([lr.LinearLR(o, 0.1, total_iters=4), lr.ExponentialLR(o, 0.9)]),
}
RETURNING: dict[str, Make] = {
    "one cycle": lambda o: lr.OneCycleLR(o, 0.1, total_steps=STEPS),
    "cyclic": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=STEPS // 4),
    "warm restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, STEPS // 3),
    "warm-up and restarts": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=4), lr.CosineAnnealingWarmRestarts(o, STEPS - 4)], [4]
    ),
}
ALL = {**FALLING, **RETURNING}


def sgd(rate: float = 0.1) -> Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return SGD([{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": rate / 2}], rate, momentum=0.9)


def wrapped(make: Make, optimizer: Optimizer, samples: float) -> BySamples:
    return BySamples(make(optimizer), steps=STEPS, samples=samples)


def values(optimizer: Optimizer) -> list[Any]:
    """What a schedule may set."""
    return [(group["lr"], group.get("momentum"), group.get("betas")) for group in optimizer.param_groups]


def course(make: Make, optimizer: Optimizer | None = None) -> list[Any]:
    """Torch's own values after 0, 1, ... steps, up to the last one that a training of `STEPS` batches has."""
    optimizer = optimizer or sgd()
    scheduler = make(optimizer)
    optimizer.step()
    found = [values(optimizer)]
    for _ in range(STEPS):
        scheduler.step()
        found.append(values(optimizer))
    return found


@pytest.mark.parametrize("name", ALL)
def test_equal_batches_have_the_values_of_torch(name: str) -> None:
    optimizer, expected = sgd(), course(ALL[name])
    scheduler = wrapped(ALL[name], optimizer, 7 * STEPS)
    for step in range(STEPS):
        assert values(optimizer) == expected[step]
        optimizer.step()
        scheduler.step(7)
    last = expected[STEPS if name in FALLING else STEPS - 1]
    assert values(optimizer) == last
    assert scheduler.get_last_lr() == [rate for rate, *_ in last]
    scheduler.step(8)  # of 168
    with pytest.warns(RuntimeWarning, match="177 samples were trained on, 168 expected.*expect"):
        scheduler.step(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step(1000)
    assert values(optimizer) == last


def test_betas_go_with_it() -> None:
    def adam() -> Optimizer:
        return Adam([torch.nn.Parameter(torch.zeros(1))], capturable=False)

    make = RETURNING["one cycle"]
    optimizer, expected = adam(), course(make, adam())
    assert len({betas for ((_, _, betas),) in expected}) > 2
    scheduler = wrapped(make, optimizer, STEPS)
    for step in range(STEPS):
        assert values(optimizer) == expected[step]
        optimizer.step()
        scheduler.step(1)


@given(st.sampled_from(sorted(ALL)), st.lists(st.integers(0, 90), min_size=1, max_size=60))
def test_batches_of_any_length(name: str, batches: list[int]) -> None:
    total = max(1, sum(batches))
    expected = course(ALL[name])
    last = STEPS if name in FALLING else STEPS - 1
    optimizer = sgd()
    scheduler = wrapped(ALL[name], optimizer, total)
    optimizer.step()
    seen = 0
    for batch in batches:
        scheduler.step(batch)
        seen += batch
        place = max(n for n in range(STEPS + 1) if n * total <= seen * STEPS)
        assert values(optimizer) == expected[min(place, last)]
    if seen:
        assert values(optimizer) == expected[last]


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=12), min_size=1, max_size=6), st.integers(1, 2000))
def test_the_end_is_met_though_the_first_guess_was_wrong(epochs: list[list[int]], guess: int) -> None:
    expected, optimizer = course(FALLING["cosine"]), sgd()
    scheduler = wrapped(FALLING["cosine"], optimizer, guess)
    optimizer.step()
    rate = values(optimizer)[0][0]
    for number, batches in enumerate(epochs):
        left = len(epochs) - number - 1
        before = values(optimizer)
        scheduler.expect(sum(batches) + left * guess)
        assert values(optimizer) == before
        for at, batch in enumerate(batches):
            scheduler.step(batch)
            assert values(optimizer)[0][0] <= rate
            rate = values(optimizer)[0][0]
            at_end = left == 0 and at == len(batches) - 1
            assert at_end or scheduler.scheduler.last_epoch < STEPS
    assert values(optimizer) == expected[-1]


@pytest.mark.parametrize("name", ["one cycle", "cosine", "warm-up and cosine"])
def test_resume_after_every_batch(name: str) -> None:
    batches = [3, 17, 4, 9, 30, 1, 12]

    def train(scheduler: BySamples, optimizer: Optimizer, first: int, end: int) -> list[Any]:
        found = []
        for number in range(first, end):
            if number == 3:
                scheduler.expect(sum(batches[3:]))
            optimizer.step()
            scheduler.step(batches[number])
            found.append(values(optimizer))
        return found

    optimizer = sgd()
    whole = train(wrapped(ALL[name], optimizer, 90), optimizer, 0, len(batches))
    assert len({str(value) for value in whole}) >= len(batches) - 1
    for first in range(len(batches) + 1):
        optimizer = sgd()
        scheduler = wrapped(ALL[name], optimizer, 90)
        train(scheduler, optimizer, 0, first)
        file = io.BytesIO()
        torch.save((optimizer.state_dict(), scheduler.state_dict()), file)
        states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        optimizer = sgd()
        scheduler = wrapped(ALL[name], optimizer, 55)
        optimizer.load_state_dict(states[0])
        scheduler.load_state_dict(states[1])
        assert scheduler.seen == sum(batches[:first])
        assert train(scheduler, optimizer, first, len(batches)) == whole[first:]


def test_steps_are_known_where_the_schedule_says_so() -> None:
    assert BySamples(lr.OneCycleLR(sgd(), 0.1, epochs=3, steps_per_epoch=5), samples=100).steps == 15
    assert BySamples(lr.CosineAnnealingLR(sgd(), 90), samples=100.4).steps == 90
    with pytest.raises(InputError, match="MultiStepLR is made for cannot be seen: give steps="):
        BySamples(FALLING["multistep"](sgd()), samples=100)
    with pytest.raises(InputError, match="total_steps=24"):
        BySamples(RETURNING["one cycle"](sgd()), samples=100, steps=25)


@pytest.mark.parametrize("samples", [0, 0.5, -3, float("inf"), float("nan"), True, "many", None])
def test_a_number_of_samples_that_is_none(samples: Any) -> None:
    with pytest.raises(InputError, match="samples="):
        BySamples(FALLING["cosine"](sgd()), samples=samples)
    scheduler = wrapped(FALLING["cosine"], sgd(), 10)
    with pytest.raises(InputError, match="samples="):
        scheduler.expect(samples)
    if samples != 0:
        with pytest.raises(InputError, match="samples="):
            scheduler.step(samples)
    assert scheduler.seen == 0


def test_schedulers_that_will_not_do() -> None:
    for scheduler in (lr.ReduceLROnPlateau(sgd()), "cosine"):
        with pytest.raises(InputError, match="does not count steps"):
            BySamples(scheduler, samples=10, steps=10)  # type: ignore[arg-type]
    optimizer = sgd()
    used = FALLING["cosine"](optimizer)
    optimizer.step()
    used.step()
    with pytest.raises(InputError, match="has made 1 steps: give a new one"):
        BySamples(used, samples=10)
    with pytest.raises(InputError, match="steps=0"):
        BySamples(FALLING["cosine"](sgd()), samples=10, steps=0)


def test_states_that_will_not_do() -> None:
    scheduler = wrapped(FALLING["cosine"], sgd(), 10)
    state = scheduler.state_dict()
    with pytest.raises(InputError, match="version None, expected 1"):
        scheduler.load_state_dict({})
    with pytest.raises(InputError, match="the state lacks seen"):
        scheduler.load_state_dict({key: value for key, value in state.items() if key != "seen"})
    other = BySamples(lr.CosineAnnealingLR(sgd(), 7), samples=10)
    with pytest.raises(InputError, match="is of 24 steps, this schedule has 7"):
        other.load_state_dict(state)
