"""What the plans of importance sampling cost the training loop."""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from benchmarks.contender import emit
from benchmarks.harness import Check, Options, Report, Spread, run_child, scratch_folder
from stallfree import ImportanceSampler
from stallfree.cache.sample_cache import SampleCache

NAME = "importance_cost"
QUESTION = "How long does it take to draw a plan of 1.28 million ids, and what does a step of 256 samples pay for it?"
PLANS = ("unbiased", "icache", "infobatch", "full")
BATCH = 256
SHARE = 0.2


def run(options: Options) -> Report:
    samples = 100_000 if options.quick else 1_280_000
    with scratch_folder() as scratch:
        found = run_child("benchmarks.importance_cost", {"samples": samples, "rounds": options.rounds}, scratch=scratch)
    rows, checks = [], []
    for plan in PLANS:
        drawn, begun = (Spread.of(found["plans"][plan][what]) for what in ("drawn", "begun"))
        rows.append([f"`{plan}`", drawn.show(".3f"), begun.show(".3f")])
        checks.append(
            Check(f"`{plan}`: s to draw a plan", drawn.median, 0.3, "<=", ".3f", spread=(drawn.low, drawn.high))
        )
    steps = {what: Spread.of(figures) for what, figures in found["steps"].items()}
    update = steps["update"]
    checks.append(Check("µs of `update` per step of 256", update.median, 100, "<=", ".0f", (update.low, update.high)))
    return Report(
        columns=["plan", "s to draw it", "s until the first batch, scores of the cache included"],
        rows=rows,
        checks=checks,
        notes=[
            f"{samples:,} ids, {SHARE:.0%} of them in a `SampleCache` of the policy `importance`. The second column is "
            "what the beginning of an epoch waits for.",
            f"Per step of {BATCH}, in the training process: `update` {update.show('.0f')} µs; to hand a batch out (its "
            f"weights, and the scores of those that may leave the cache) {steps['served'].show('.0f')} µs. Medians of "
            "each round.",
        ],
        versions=found["versions"],
        raw=found,
    )


def child() -> None:
    given = json.loads(sys.argv[1])
    samples, rng = given["samples"], np.random.default_rng(0)
    value = np.zeros(64, np.uint8)
    plans: dict[str, Any] = {plan: {"drawn": [], "begun": []} for plan in PLANS}
    steps: dict[str, list[float]] = {"update": [], "served": []}
    room = 32 * samples + round(SHARE * samples) * 64 + (1 << 20)
    with SampleCache(samples, capacity=room, fingerprint="cost", policy="importance", example=value) as cache:
        some = rng.permutation(samples)[: round(SHARE * samples)]
        for start in range(0, len(some), 4096):
            ids = some[start : start + 4096]
            cache.put_many(ids, [value] * len(ids))
        losses = rng.exponential(size=samples).astype(np.float32)
        samplers = {plan: ImportanceSampler(samples, plan=plan, cache=cache) for plan in PLANS}
        for sampler in samplers.values():
            sampler.plan(0)
            sampler.update(np.arange(samples), losses)
        for epoch in range(1, 1 + given["rounds"]):
            for plan, sampler in samplers.items():
                started = time.perf_counter()
                sampler.plan(epoch)
                plans[plan]["drawn"].append(time.perf_counter() - started)
                begun = sampler.begin(epoch, BATCH)
                plans[plan]["begun"].append(time.perf_counter() - started)
                if plan == "unbiased":
                    _steps(sampler, begun, steps)
                begun.end()
        emit({"plans": plans, "steps": steps}, stallfree=version("stallfree"), numpy=np.__version__)


def _steps(sampler: ImportanceSampler, begun: Any, steps: dict[str, list[float]]) -> None:
    """What 400 steps of an epoch pay: the medians, in microseconds."""
    update, served = [], []
    for ids in begun.batches[:400]:
        losses, chosen = torch.rand(len(ids)), torch.from_numpy(ids)
        started = time.perf_counter()
        begun.served(ids)
        middle = time.perf_counter()
        sampler.update(chosen, losses)
        update.append(time.perf_counter() - middle)
        served.append(middle - started)
    steps["update"].append(1e6 * float(np.median(update)))
    steps["served"].append(1e6 * float(np.median(served)))


if __name__ == "__main__":
    child()
