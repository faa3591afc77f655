"""A plan is a pure function of (seed, epoch), and takes every sample once."""

from __future__ import annotations

import numpy as np

from stallfree.datasets.epoch_source import make_plan
from warm import Interpreter


def test_another_order_for_another_seed_and_for_another_epoch() -> None:
    orders = {
        tuple(make_plan(50, shuffle=True, seed=seed, epoch=epoch).ids.tolist())
        for seed in (-1, 0, 1, 2**63, 2**64 - 2)
        for epoch in range(10)
    }
    assert len(orders) == 50


def test_every_position_is_as_likely() -> None:
    firsts = np.array([make_plan(10, shuffle=True, seed=3, epoch=epoch).ids for epoch in range(2000)])
    for position in range(10):
        counts = np.bincount(firsts[:, position], minlength=10)
        assert ((counts - 200) ** 2 / 200).sum() < 33.7  # chi-squared, 9 degrees of freedom, one in 10,000


def test_another_process_makes_the_same_plan(interpreter: Interpreter) -> None:
    made = "make_plan(20, shuffle=True, seed=7, epoch=3)"
    code = f"from stallfree.datasets.epoch_source import make_plan; print({made}.ids.tolist())"
    assert interpreter.run(code).out.strip() == str(make_plan(20, shuffle=True, seed=7, epoch=3).ids.tolist())
