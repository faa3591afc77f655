"""A search over hyper-parameters with Ray Tune behind slow storage: one shared loader, or one in each trial."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.harness import Check, Json, Options, Report, Spread, run_child, say, scratch_folder
from benchmarks.peers import venvs
from benchmarks.photos import make_photos

NAME = "shared_search"
QUESTION = (
    "A search of 8 trials with Ray Tune, all at once, behind storage of 60 MB/s and a cache for 35% of the data: how "
    "much sooner is it through when the trials share their loader?"
)
MODULE = "benchmarks.contenders.shared_search"
TRIALS, EPOCHS, BATCH = 8, 4, 64
SAMPLES = 2000
BANDWIDTH, SHARE = 60e6, 0.35
STEP = 0.02
"""Seconds of a training step, during which the trial waits."""
PAPER = 5.5
WHO = {"shared": "SharedLoader, 2 workers for all", "own": "own torch DataLoader, 1 worker each"}
CLAIM = "search of 8 trials with Ray Tune, storage of 60 MB/s: time with own loaders over time with a shared one"


def run(options: Options) -> Report:
    if reason := venvs.why_missing("ray"):
        return Report(["loader"], [], [Check(f"{CLAIM}; paper: {PAPER}", None, PAPER, failed=reason)])
    found: dict[str, list[Json]] = {who: [] for who in WHO}
    prep: list[float] = []
    with scratch_folder() as scratch:
        photos = str(scratch / "photos")
        what = make_photos(scratch / "photos", options.data, 400 if options.quick else SAMPLES)
        common: Json = {"photos": photos, "batch": BATCH}
        task = common | {"trials": TRIALS, "epochs": EPOCHS, "bandwidth": BANDWIDTH, "share": SHARE, "step": STEP}
        for number in range(1 if options.quick else 2):
            alone = common | {"who": "stallfree", "workers": 2, "seconds": 1.0}
            prep.append(statistics.median(run_child("benchmarks.contenders.jpeg", alone, scratch=scratch)["rates"]))
            for who in WHO:
                result = run_child(MODULE, task | {"who": who}, scratch=scratch, python=venvs.python_of("ray"))
                found[who].append(result)
                say(f"  round {number + 1}: {WHO[who]}: {result['seconds']:.1f} s, in all {result['whole']:.1f} s")
    return _report(what, found, prep)


def _report(what: str, found: dict[str, list[Json]], prep: list[float]) -> Report:
    rates = {who: [_bound(who, result, p) for result, p in zip(found[who], prep, strict=True)] for who in WHO}
    bound = statistics.median(a / b for a, b in zip(rates["shared"], rates["own"], strict=True))
    spread = Spread.of([own["seconds"] / ours["seconds"] for own, ours in _rounds(found)])
    whole = Spread.of([own["whole"] / ours["whole"] for own, ours in _rounds(found)])
    first = found["shared"][0]
    return Report(
        columns=[
            "loader in each trial",
            "s, trials",
            "bound, s",
            "s, with the start and end of Ray",
            "read per epoch / data",
            "samples/s per trial",
        ],
        rows=[_row(who, found[who], rates[who]) for who in WHO],
        checks=[
            Check(
                f"{CLAIM}; bound {bound:.2f}; paper: {PAPER}",
                spread.median,
                PAPER,
                spread=(spread.low, spread.high),
            )
        ],
        notes=[
            f"{what}, behind a `ThrottledSource` whose 60 MB/s all trials share; decode, random crop of 224, flip; "
            f"batches of {BATCH}; {EPOCHS} epochs per trial, reported to Ray after each; a step is a wait of "
            f"{STEP * 1000:.0f} ms. All trials use one cache, which is full when the search begins and holds "
            f"{1 - first['absent'] / first['total']:.3f} of the bytes, as they were fetched. The time is from the "
            "first trial's first batch to the end of the last one; the trials begin together, when Ray has started all "
            "of them. With the starting and ending of Ray's processes, which is the same for both, the ratio is "
            f"{whole.show('.2f')}; that part does not grow with the data.",
            "Bound: epochs x samples / min(F, P, G), F = 60 MB/s over the bytes of an epoch that are not resident, P = "
            f"{Spread.of(prep).show()} samples/s with 2 workers and all files in memory, G from the step; F/8 and P/8 "
            f"for trials with loaders of their own. {len(prep)} rounds, ratios within a round.",
        ],
        versions=first["versions"],
        raw={"prep": prep, "found": found},
    )


def _rounds(found: dict[str, list[Json]]) -> list[tuple[Json, Json]]:
    return list(zip(found["own"], found["shared"], strict=True))


def _bound(who: str, result: Json, prep: float) -> float:
    """Samples/s that storage, prep and step allow a trial."""
    among = 1 if who == "shared" else TRIALS
    fetch = BANDWIDTH * result["samples"] / max(1, result["absent"])
    return min(fetch / among, prep / among, BATCH / STEP)


def _row(who: str, results: list[Json], rates: list[float]) -> list[str]:
    samples: float = results[0]["samples"]

    def show(figures: list[float], form: str) -> str:
        return Spread.of(figures).show(form)

    epochs: Any = [seconds for result in results for trial in result["epochs"] for seconds in trial]
    return [
        WHO[who],
        show([result["seconds"] for result in results], ".1f"),
        show([EPOCHS * samples / rate for rate in rates], ".1f"),
        show([result["whole"] for result in results], ".1f"),
        show([result["read"] / result["total"] / EPOCHS for result in results], ".3f"),
        f"{samples / statistics.median(epochs):,.0f}",
    ]
