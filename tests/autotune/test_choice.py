"""What the model of speed chooses: exact figures of known rates, and against an independent search of all ways."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree.autotune.choice import SAMPLES, Measured, choose, describe, expect, explain

SLOW_STORAGE = Measured(
    samples=1000,
    storage={8: 100.0},
    fetching=0.0,
    whole=0.010,
    deterministic=0.009,
    random=0.001,
    reading=(0.0001, 0.0002),
    sizes=(100_000.0, 400_000.0),
)


def test_the_figures_of_a_cache_of_half_of_the_samples_as_fetched() -> None:
    found = expect(SLOW_STORAGE, 0.0, 50_000_000, workers=2)
    assert found.hits == pytest.approx(0.5)
    assert 1 / found.fetch == pytest.approx(0.5 * 0.0001 / 2 + 0.5 / 100)
    assert found.prep == pytest.approx(2 / (0.010 + 0.5 * 0.0001))
    assert found.rate == found.prep


def test_the_figures_of_a_cache_of_half_of_the_samples_prepared() -> None:
    found = expect(SLOW_STORAGE, 1.0, 200_000_000, workers=2)
    assert found.hits == pytest.approx(0.5)
    assert 1 / found.fetch == pytest.approx(0.5 * 0.0002 / 2 + 0.5 / 100)
    assert 2 / found.prep == pytest.approx(0.5 * (0.001 + 0.0002) + 0.5 * 0.010)


@pytest.mark.parametrize(
    ("room", "share"),
    [
        (500_000_000, 1.0),  # all fit prepared
        (20_000_000, 0.0),  # a fifth fits as fetched, and fetching is what limits
    ],
)
def test_one_form_for_all_where_a_mixture_gains_nothing(room: int, share: float) -> None:
    assert choose(SLOW_STORAGE, room, workers=4, cpus=4).share == share


def test_a_mixture_where_all_fit_as_fetched_and_prep_limits() -> None:
    room = 200_000_000  # twice what all take as fetched, half of what they take prepared
    slower = replace(SLOW_STORAGE, storage={8: 5.0})
    chosen = choose(slower, room, workers=1, cpus=4)
    assert chosen.share == pytest.approx(5 / 16)  # 1000 * (5/16 * 400 KB + 11/16 * 100 KB) = 194 MB: all fit
    assert chosen.hits == pytest.approx(1.0)
    for other in (None, 0.0, 1.0):
        assert chosen.rate > 1.1 * expect(slower, other, room, workers=1).rate


def test_no_cache_where_storage_is_no_wait_and_nothing_is_deterministic() -> None:
    warm = replace(SLOW_STORAGE, storage={8: math.inf}, deterministic=0.0, random=0.010, sizes=(100_000.0, math.inf))
    chosen = choose(warm, 500_000_000, workers=2, cpus=2)
    assert (chosen.share, chosen.hits) == (None, 0.0)
    assert "no cache" in explain(warm, chosen, 500_000_000, SAMPLES)


def test_no_cache_where_not_one_sample_fits() -> None:
    assert choose(SLOW_STORAGE, 0, workers=2, cpus=2).share is None


def test_what_cannot_be_stored_is_not_chosen() -> None:
    for sizes, share in (((100_000.0, math.inf), 0.0), ((math.inf, 400_000.0), 1.0), ((math.inf, math.inf), None)):
        assert choose(replace(SLOW_STORAGE, sizes=sizes), 500_000_000, workers=2, cpus=2).share == share


def test_workers_are_as_many_as_the_device_needs_and_no_more_than_cores() -> None:
    prep = replace(SLOW_STORAGE, storage={8: math.inf}, sizes=(math.inf, math.inf))  # 100/s and worker
    workers = {
        compute: choose(replace(prep, compute=compute), 0, workers=None, cpus=6).workers
        for compute in (50.0, 170.0, 250.0, 1e6)
    }
    assert workers == {50.0: 2, 170.0: 4, 250.0: 5, 1e6: 6}  # twice what the device takes
    assert choose(prep, 0, workers=3, cpus=6).workers == 3


def test_fetches_at_once_are_as_few_as_keep_the_rate() -> None:
    wait = replace(SLOW_STORAGE, storage={8: 100.0, 16: 195.0, 32: 380.0, 64: 385.0}, whole=0.001)
    assert choose(wait, 0, workers=8, cpus=8).threads == 32
    assert choose(replace(wait, whole=0.050), 0, workers=8, cpus=8).threads == 16  # 160/s is all that prep takes


def test_a_cache_that_saves_less_than_50_microseconds_per_sample_is_not_worth_it() -> None:
    tiny = replace(
        SLOW_STORAGE, storage={8: math.inf}, whole=60e-6, deterministic=60e-6, random=0.0, reading=(5e-6, 5e-6)
    )
    assert choose(tiny, 10**9, workers=1, cpus=2).share == 1
    assert choose(replace(tiny, whole=50e-6, deterministic=50e-6), 10**9, workers=1, cpus=2).share is None
    assert (
        choose(replace(tiny, whole=50e-6, deterministic=50e-6, storage={8: 1e4}), 10**9, workers=1, cpus=2).share == 1
    )


def test_the_line_says_what_and_why() -> None:
    slower = replace(SLOW_STORAGE, storage={8: 5.0})
    chosen = choose(slower, 200_000_000, workers=1, cpus=4)
    line = explain(slower, chosen, 200_000_000, SAMPLES)
    assert "\n" not in line
    for part in ("31% of the samples cached prepared", "1 worker", "8 fetches at once", "97.7 KiB", "190.7 MiB"):
        assert part in line


def test_the_line_for_people() -> None:
    def line(rates: Measured, room: int) -> str:
        return describe(rates, choose(rates, room, workers=2, cpus=2), ("files cached", ""))

    warm = replace(SLOW_STORAGE, sizes=(100_000.0, math.inf))
    assert line(warm, 100_000_000) == "files cached, 100% of them fit; 2 workers; prep limits the loader"
    limited = replace(warm, compute=150.0)
    assert line(limited, 100_000_000).endswith("; the training step is the limit")
    slower = replace(SLOW_STORAGE, storage={8: 5.0})
    assert line(slower, 50_000_000).endswith("; fetching limits the loader")
    trained = replace(SLOW_STORAGE, compute=50.0)
    assert line(trained, 0) == (
        "no cache; 2 workers; the training step is the limit, and a cache would gain too little"
    )


seconds = st.floats(1e-6, 0.1)


@st.composite
def rates(draw: st.DrawFn) -> Measured:
    deterministic, random = draw(seconds), draw(seconds)
    return Measured(
        samples=draw(st.integers(10, 10**6)),
        storage={8: draw(st.floats(1.0, 1e5))},
        fetching=draw(seconds),
        whole=deterministic + random,
        deterministic=deterministic,
        random=random,
        reading=(draw(st.floats(0, 0.001)), draw(st.floats(0, 0.001))),
        sizes=(draw(st.floats(100, 1e6)), draw(st.floats(100, 1e7))),
        compute=draw(st.sampled_from([math.inf, 10.0, 1000.0])),
    )


def model(measured: Measured, share: float, stored: float, room: int, workers: int) -> float:
    """Samples/s by another way of counting: what an epoch asks of storage and of the workers."""
    n = measured.samples
    size = share * measured.sizes[1] + (1 - share) * measured.sizes[0]
    kept = min(n, room / size) * stored
    out = n - kept
    reading = kept * (share * measured.reading[1] + (1 - share) * measured.reading[0])
    prepared_again = out * (measured.fetching + measured.whole)
    work = reading + kept * (share * measured.random + (1 - share) * measured.whole) + prepared_again
    line = reading / workers + out / measured.storage[8]
    return n / max(work / workers, line)


@given(rates(), st.integers(0, 10**10), st.integers(1, 8))
def test_nothing_is_better_than_what_was_chosen_and_doing_nothing_never_is(
    measured: Measured, room: int, workers: int
) -> None:
    chosen = choose(measured, room, workers=workers, cpus=workers)
    enough = 1.25 * measured.compute
    ways = [model(measured, 0.0, 0.0, room, workers)]
    ways += [model(measured, number / 16, 1.0, room, workers) for number in range(17)]
    best = min(enough, max(ways))
    there = model(measured, chosen.share or 0.0, float(chosen.share is not None), room, workers)
    assert there == pytest.approx(chosen.rate)
    assert there * 1.0201 >= best * (1 - 1e-9)
    assert there * 1.0201 >= min(enough, ways[0]) * (1 - 1e-9)
