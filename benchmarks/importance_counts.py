"""Storage operations and hits of the plans of importance sampling and of their rivals, counted."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.contender import emit
from benchmarks.harness import Check, Json, Options, Report, run_child, say, scratch_folder
from benchmarks.importance_policies import BATCH, PACKAGE, Counts, Maker, quiver, sampled

NAME = "importance_counts"
QUESTION = (
    "Plans drawn from the recorded losses of a real training: how many storage operations does an epoch cost, and what "
    "share of the samples comes out of the cache, with room for 20, 40, 60 and 80% of the samples?"
)
SHARES = (0.2, 0.4, 0.6, 0.8)
PAPER = (0.37, 0.55, 0.69, 0.83)
"""Hit ratios of iCACHE at these sizes (Chen et al., HPCA 2023)."""
EVERY = 3
"""In the paper's reading each so many epochs one takes all samples (the default of the sampler that was released)."""

_PAPERS: Json = {"plan": "icache", "full_every": EVERY}
_ICACHE, _READING = "icache: swap", f"icache: substitute, packages, every {EVERY}rd epoch full (as we read the paper)"
_UNBIASED = "unbiased, MinIO"
_LRU, _COORDL = "Default: full plan, LRU", "CoorDL: full plan, MinIO"
CONTESTANTS: dict[str, Maker] = {
    _LRU: sampled("lru", plan="full"),
    "Base: cis (all are fetched), LRU": sampled("lru", plan="full", trains="icache"),
    "Quiver: full plan, two packages": quiver,
    _COORDL: sampled("minio", plan="full"),
    "iLFU: icache's draws, LFU": sampled("lfu", plan="icache", on_miss="fetch"),
    "SHADE: ranks in the batch, importance": sampled("importance", plan="icache", relative=True, on_miss="fetch"),
    _ICACHE: sampled("importance", plan="icache"),
    "icache: substitute": sampled("importance", plan="icache", on_miss="substitute"),
    "icache: swap, packages": sampled("importance", plan="icache", packages=True),
    "icache: substitute, packages": sampled("importance", plan="icache", on_miss="substitute", packages=True),
    f"icache: swap, packages, every {EVERY}rd epoch full": sampled("importance", packages=True, **_PAPERS),
    _READING: sampled("importance", on_miss="substitute", packages=True, **_PAPERS),
    _UNBIASED: sampled("minio"),
    "unbiased, rotating": sampled("importance"),
    "unbiased, target_io 0.5, MinIO": sampled("minio", target_io=0.5),
    "unbiased, target_io 0.5, rotating": sampled("importance", target_io=0.5),
    "Oracle: icache's draws, all hit": sampled("importance", everything=True, plan="icache"),
}

Array = npt.NDArray[Any]


def run(options: Options) -> Report:
    given: Json = {"losses": str(_find(options.data) or ""), "quick": options.quick}
    found: dict[float, Json] = {}
    with scratch_folder() as scratch:
        for share in SHARES:
            found[share] = run_child("benchmarks.importance_counts", given | {"share": share}, scratch=scratch)
            say(f"  {share:.0%}: {found[share]['seconds']:.0f} s")
    runs = [found[share]["contestants"] for share in SHARES]
    return Report(
        columns=[
            "20 / 40 / 60 / 80% cache",
            "trained per epoch, share of N",
            "hit ratio of what was asked for",
            "of what was served",
            "storage operations per epoch, share of N",
            "of these to pack",
            "of these to read packages",
            "samples read from storage, share of N",
            "worst epoch over MinIO's",
        ],
        rows=[_row(who, [run[who] for run in runs]) for who in CONTESTANTS],
        checks=_checks(runs),
        notes=_notes(found[SHARES[0]]),
        versions=found[SHARES[0]]["versions"],
        raw=list(found.values()),
    )


def _find(data: Path | None) -> Path | None:
    """The file of recorded losses: what is given itself, or in it at any depth."""
    if data is None or data.is_file():
        return data
    return next(iter(sorted(data.rglob("losses*.npz"))), None)


def _row(who: str, sizes: list[Json]) -> list[str]:
    forms = {"trained": ".2f", "own": ".2f", "hits": ".2f", "operations": ".3f", "packing": ".3f", "reading": ".3f"}
    forms |= {"moved": ".2f", "worst": ".2f"}
    return [who, *(" / ".join(f"{found[name]:{form}}" for found in sizes) for name, form in forms.items())]


def _checks(runs: list[dict[str, Json]]) -> list[Check]:
    checks = []
    for share, run in zip(SHARES, runs, strict=True):
        formula = share + (1 - share) * math.log(1 - share)
        apart = abs(run[_LRU]["hits"] - formula)
        what = f"{share:.0%} cache: hit ratio of LRU, {run[_LRU]['hits']:.3f}, away from c + (1-c) ln(1-c)"
        checks.append(Check(what, apart, 0.01, "<=", ".3f"))
    for share, run, paper in zip(SHARES, runs, PAPER, strict=True):
        hits = run[_READING]["hits"]
        what = f"{share:.0%} cache: hit ratio of `icache`, {hits:.2f}, away from the paper's {paper:.2f}"
        checks.append(Check(what, abs(hits - paper), 0.05, "<=", ".3f"))
    for name, other in (("as we read the paper", _READING), ("at its default, swap", _ICACHE)):
        for share, run in zip(SHARES, runs, strict=True):
            value = run[_UNBIASED]["operations"] / run[other]["operations"]
            what = f"{share:.0%} cache: storage operations of `unbiased` (default, MinIO) over those of `icache` {name}"
            checks.append(Check(what, value, 0.70, "<="))
    for plan in ("unbiased", "icache"):
        worst = max(found["worst"] for run in runs for who, found in run.items() if who.startswith(plan))
        what = f"operations of `{plan}` over those of MinIO on the full plan, the worst epoch of all rows and sizes"
        checks.append(Check(what, worst, 1.0, "<=", ".3f"))
    return checks


def _notes(found: Json) -> list[str]:
    return [
        f"{found['about']}: {found['samples']:,} samples, {found['epochs']} epochs, batches of {BATCH}. A sample that "
        "is drawn in an epoch has the recorded loss of that epoch, one that is not keeps its old one. Each cell has "
        "one figure per cache size: the mean over all epochs but the first, in which the cache is filled.",
        "*Asked for*: the sample whose turn it is was resident. *Served*: the sample that was handed out was resident, "
        "so what comes instead of a missing L-sample is a hit, as in the paper. All hits over all requests.",
        "An operation is a sample fetched by itself, or a package read, or a package written; packages are of "
        f"{PACKAGE} samples. *To pack*: the samples fetched for packages, and the packages written; for Quiver all "
        "that it loads, one by one, ahead of use. *Read from storage*: fetched, or in a package that was read, of use "
        "or not. What is done in the background keeps pace here; what it costs in time is another table's question.",
        "The operations of the worst epoch are given over those of MinIO on the full plan in the same epoch: N in the "
        "first, what is not resident in the others.",
        "Quiver (Kumar and Sivathanu, FAST 2020): the samples are cut into packages of half the cache, once; while one "
        "is used up in any order, the next is loaded; storage gives every sample once per epoch. SHADE (Khan et al., "
        "FAST 2023): only its score and its cache, not its sampling with repetition.",
        "The hit ratio of `icache` depends on how often an epoch takes all samples: such an epoch hits the resident "
        f"share only. The paper has one every n-th time; n = {EVERY} is the default of the sampler that was released "
        "with it, so that row is the one compared with the paper.",
    ]


# -- one size ---------------------------------------------------------------------------------------------------------


def child() -> None:
    given = json.loads(sys.argv[1])
    losses, about = _losses(given["losses"], given["quick"])
    room = round(given["share"] * losses.shape[1])
    start = time.perf_counter()
    contestants = {who: _play(maker, losses, room) for who, maker in CONTESTANTS.items()}
    emit(
        {
            "share": given["share"],
            "about": about,
            "epochs": losses.shape[0],
            "samples": losses.shape[1],
            "seconds": time.perf_counter() - start,
            "contestants": contestants,
        },
        stallfree=version("stallfree"),
        numpy=np.__version__,
    )


def _losses(recorded: str, quick: bool) -> tuple[Array, str]:
    """Losses, float32 [epochs, samples], and where they come from."""
    if recorded:
        with np.load(recorded) as file:
            losses, about = file["losses"].astype(np.float32), json.loads(str(file["about"]))
        text = f"Losses of {about['data']}, {about['network']}, {about['top1_percent']}% top-1"
        return (losses[:6, :10_000], text + ", a part of them") if quick else (losses, text)
    return made_up(6, 10_000) if quick else made_up(30, 50_000)


def made_up(epochs: int, samples: int) -> tuple[Array, str]:
    """Exponential losses that fall; how hard a sample is drifts from epoch to epoch."""
    rng = np.random.default_rng(0)
    hard, losses = rng.exponential(size=samples), np.empty((epochs, samples), np.float32)
    for epoch in range(epochs):
        hard = 0.9 * hard + 0.1 * rng.exponential(size=samples)
        losses[epoch] = hard * rng.exponential(size=samples) * 0.95**epoch
    return losses, "Made-up losses (exponential, drifting)"


def _play(maker: Maker, losses: Array, room: int) -> Json:
    """All epochs of a contestant."""
    samples = losses.shape[1]
    with tempfile.TemporaryDirectory() as folder:
        contestant = maker(samples, room, Path(folder), 0)
        epochs = [contestant.epoch(number, row) for number, row in enumerate(losses)]
    later = Counts(**{name: sum(vars(counts)[name] for counts in epochs[1:]) for name in vars(epochs[0])})
    every = samples * (len(epochs) - 1)
    most = [samples, *[samples - room] * (len(epochs) - 1)]
    return {
        "trained": later.trained / every,
        "own": later.own / later.asked,
        "hits": 1 - later.fetched / later.served,
        "operations": later.operations / every,
        "packing": (later.loaded + later.written) / every,
        "reading": later.read / every,
        "moved": (later.fetched + later.loaded + PACKAGE * later.read) / every,
        "worst": max(counts.operations / bound for counts, bound in zip(epochs, most, strict=True)),
        "epochs": [vars(counts) for counts in epochs],
    }


if __name__ == "__main__":
    child()
