"""The plan of an epoch: every sample once, and nothing but (seed, epoch) decides the order."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stallfree.plans import make_plan

SEEDS = st.integers(-(2**63), 2**64 - 1)
EPOCHS = st.integers(0, 2**31)


@given(st.integers(1, 300), SEEDS, EPOCHS, st.booleans())
def test_every_sample_once(num_samples: int, seed: int, epoch: int, shuffle: bool) -> None:
    plan = make_plan(num_samples, shuffle=shuffle, seed=seed, epoch=epoch)
    assert sorted(plan.ids.tolist()) == list(range(num_samples))
    assert plan.ids.dtype == np.int64
    assert plan.weights is None
    assert plan.epoch == epoch


@given(SEEDS, EPOCHS)
def test_the_order_is_a_function_of_seed_and_epoch(seed: int, epoch: int) -> None:
    def ids(seed: int, epoch: int) -> list[int]:
        return make_plan(50, shuffle=True, seed=seed, epoch=epoch).ids.tolist()

    assert ids(seed, epoch) == ids(seed, epoch)
    assert ids(seed, epoch) != ids(seed, epoch + 1)
    assert ids(seed, epoch) != ids((seed + 1) % 2**64, epoch)


def test_without_shuffle_in_order() -> None:
    assert make_plan(7, shuffle=False, seed=3, epoch=5).ids.tolist() == list(range(7))


def test_another_process_computes_the_same_plan() -> None:
    code = "from stallfree.plans import make_plan; print(make_plan(20, shuffle=True, seed=9, epoch=4).ids.tolist())"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(make_plan(20, shuffle=True, seed=9, epoch=4).ids.tolist())


def test_all_places_are_equally_likely_for_a_sample() -> None:
    places = [int(np.flatnonzero(make_plan(10, shuffle=True, seed=0, epoch=e).ids == 3)[0]) for e in range(5000)]
    counts = np.bincount(places, minlength=10)
    assert ((counts - 500) ** 2 / 500).sum() < 27.9  # chi-square of 9 degrees of freedom at 0.001; the seed is fixed
