"""How long a replay of every policy takes."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.contender import emit
from benchmarks.harness import Check, Options, Report, Spread, run_child, say, scratch_folder
from stallfree.analysis.replay import replay
from stallfree.cache.policies import POLICIES
from stallfree.datasets.epoch_source import make_plan

NAME = "replay"
QUESTION = "How long does `sf.replay` take on one core for 10 shuffled epochs of as many ids as ImageNet has?"
IDS = 1_300_000
EPOCHS = 10
SHARES = ("35%", "65%")
SECONDS = 10.0

Json = dict[str, Any]


def run(options: Options) -> Report:
    ids = IDS // 10 if options.quick else IDS
    times = 1 if options.quick else 3
    raw: list[Json] = []
    with scratch_folder() as scratch:
        for turn in range(times):
            for policy in sorted(POLICIES):
                found = run_child("benchmarks.replay", {"ids": ids, "policy": policy}, scratch=scratch)
                say(f"  round {turn + 1}: {policy}: {', '.join(f'{taken:.1f} s' for taken in found['seconds'])}")
                raw.append(found)
    rows, checks = [], []
    for policy in sorted(POLICIES):
        runs = [found for found in raw if found["policy"] == policy]
        spreads = [Spread.of([found["seconds"][at] for found in runs]) for at in range(len(SHARES))]
        ratios = [f"{ratio:.2%}" for ratio in runs[0]["hit_ratios"]]
        cells = [(spread.show(".1f"), ratio) for spread, ratio in zip(spreads, ratios, strict=True)]
        rows.append([policy, *(cell for pair in cells for cell in pair)])
        slower = max(spreads, key=lambda spread: spread.median)
        what = f"replay of `{policy}`, {ids:,} ids, {EPOCHS} epochs, s"
        checks.append(Check(what, slower.median, SECONDS, "<", ".1f", (slower.low, slower.high)))
    return Report(
        columns=["policy", *(text for share in SHARES for text in (f"s, room for {share}", f"hit ratio, {share}"))],
        rows=rows,
        checks=checks,
        notes=[
            f"{ids:,} ids, {EPOCHS} epochs, each another permutation, looked up and stored in batches of 256, in a "
            "fresh process that may use one core. The times contain all of `sf.replay`; the hit ratios are of the last "
            "epoch. Importances are drawn again for each epoch. Each epoch asks for every sample once, so no policy "
            "can hit more than the share that fits; `minio` and `oracle` do hit it. The checks take the slower of the "
            "two sizes."
        ],
        versions=raw[0]["versions"],
        raw=raw,
    )


def child() -> None:
    given = json.loads(sys.argv[1])
    ids, policy = given["ids"], given["policy"]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    plans = [make_plan(ids, shuffle=True, seed=0, epoch=epoch) for epoch in range(EPOCHS)]
    scores = np.random.default_rng(0).random((EPOCHS, ids)) if policy == "importance" else None
    seconds, hit_ratios = [], []
    for share in SHARES:
        start = time.perf_counter()
        found = replay(plans, policy=policy, capacity=share, scores=scores)
        seconds.append(time.perf_counter() - start)
        hit_ratios.append(found.epochs[-1].hit_ratio)
    emit(
        {"policy": policy, "seconds": seconds, "hit_ratios": hit_ratios},
        stallfree=version("stallfree"),
        numpy=np.__version__,
    )


if __name__ == "__main__":
    child()
