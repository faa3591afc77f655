"""Several jobs that decode the same photographs: prepared once for all of them, or by each for itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Check, Json, Options, Report, Spread, run_child, say, scratch_folder
from benchmarks.photos import make_photos

NAME = "shared_jobs"
QUESTION = (
    "2, 4 and 8 jobs on 2 cores decode and augment the same photographs, which are in memory: what does each of them "
    "get from one `SharedLoader`, and what from a torch DataLoader of its own?"
)
MODULE = "benchmarks.contenders.shared_jobs"
CASES = ((2, 0.25), (4, 0.25), (8, 0.25), (8, 1.0))
"""Jobs, and G of each as a share of P. With 8 jobs, 0.25 makes a prep stall of 50% for those that share nothing."""
WHO = {"shared": "one SharedLoader", "torch": "own torch DataLoader"}
SAMPLES = 480
MIB = 1 << 20


@dataclass
class Case:
    """So many jobs, with devices of one speed.

    Attributes:
        jobs: how many.
        share: G over P, to say which case it is.
        device: G in samples/s.
        found: per contender, one result per round.
        prep: P of each round.
    """

    jobs: int
    share: float
    device: float
    found: dict[str, list[Json]] = field(default_factory=lambda: {who: [] for who in WHO})
    prep: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.jobs} job{'s' * (self.jobs > 1)}, G = {self.share:g} P"

    def rates(self, who: str) -> list[float]:
        return [result["rates"][0] for result in self.found[who]]

    def bounds(self, who: str) -> list[float]:
        """What the model allows each job, round by round: min(G, P) or min(G, P/K)."""
        among = self.jobs if who == "torch" else 1
        return [min(self.device, prep / among) for prep in self.prep]

    def ratio(self) -> Spread:
        return Spread.of([a / b for a, b in zip(self.rates("shared"), self.rates("torch"), strict=True)])

    def ideal(self) -> list[float]:
        return [a / b for a, b in zip(self.bounds("shared"), self.bounds("torch"), strict=True)]

    def share_of_ideal(self) -> Spread:
        ratios = [a / b for a, b in zip(self.rates("shared"), self.rates("torch"), strict=True)]
        return Spread.of([ratio / ideal for ratio, ideal in zip(ratios, self.ideal(), strict=True)])

    def row(self, who: str) -> list[str]:
        rates, bounds = self.rates(who), self.bounds(who)
        waits = Spread.of([result["wait_share"] for result in self.found[who]])
        return [
            self.name,
            WHO[who],
            f"{self.device:,.0f}",
            f"{Spread.of(bounds).median:,.0f}",
            Spread.of(rates).show(),
            f"{Spread.of([a / b for a, b in zip(rates, bounds, strict=True)]).median:.2f}",
            f"{waits.median:.0%}",
            f"{Spread.of([result['decodes'] / result['samples'] for result in self.found[who]]).median:.3f}",
        ]


def run(options: Options) -> Report:
    rounds, seconds = (1, 1.0) if options.quick else (3, 3.0)
    with scratch_folder() as scratch:
        what = make_photos(scratch / "photos", options.data, SAMPLES)
        common = {"photos": str(scratch / "photos"), "ledger": str(scratch / "ledger"), "seconds": 1.5}
        prep = _prep(common, scratch)
        cases = [Case(jobs, share, share * prep) for jobs, share in CASES]
        for number in range(rounds):
            for case in cases:
                case.prep.append(_prep(common, scratch))
                say(f"  round {number + 1}: P: {case.prep[-1]:,.0f} samples/s")
                _measure(case, common, seconds, scratch)
        single = Case(1, 0.25, cases[0].device)
        single.found["shared"].append(_run_jobs(single, "shared", common, 2, scratch))
    return _report(what, rounds, cases, single)


def _prep(common: Json, scratch: Path) -> float:
    rate: float = run_child(MODULE, common | {"who": "prep"}, scratch=scratch)["rates"][0]
    return rate


def _measure(case: Case, common: Json, seconds: float, scratch: Path) -> None:
    """Both contenders, for about so many seconds and at least two epochs."""
    for who in WHO:
        epochs = max(2, round(seconds * case.bounds(who)[-1] / SAMPLES))
        result = _run_jobs(case, who, common, epochs, scratch)
        case.found[who].append(result)
        say(f"    {case.name}: {WHO[who]}: {result['rates'][0]:,.0f} samples/s per job")


def _run_jobs(case: Case, who: str, common: Json, epochs: int, scratch: Path) -> Json:
    params = {"who": who, "jobs": case.jobs, "device": case.device, "epochs": epochs}
    return run_child(MODULE, common | params, scratch=scratch)


def _report(what: str, rounds: int, cases: list[Case], single: Case) -> Report:
    checks = []
    for case in cases:
        share, ideal = case.share_of_ideal(), Spread.of(case.ideal()).median
        text = (
            f"{case.name}: samples/s per job, shared over own, {case.ratio().median:.2f}; share of the ideal "
            f"min(G, P) / min(G, P/K) = {ideal:.2f}"
        )
        checks.append(Check(text, share.median, 0.9, spread=(share.low, share.high)))
    half, ratio = cases[2], cases[2].ratio()
    text = f"{half.jobs} jobs, G set for a prep stall of 50%: samples/s per job, shared over own"
    checks.append(Check(text, ratio.median, 1.8, spread=(ratio.low, ratio.high)))
    for case in cases:
        most = max(result["decodes"] / result["samples"] for result in case.found["shared"])
        checks.append(Check(f"{case.name}, shared: pictures decoded per epoch over N", most, 1, "==", ".4f"))
    most = max(_extra(result) for case in [*cases, single] for result in case.found["shared"])
    checks.append(Check("shared memory beside the cache and the ring, the most, MiB", most / MIB, 1.0, "<=", ".2f"))
    return Report(
        columns=["jobs", "loader", "G", "bound", "samples/s per job", "share", "waiting", "decodes per epoch / N"],
        rows=[case.row(who) for case in cases for who in WHO],
        checks=checks,
        notes=[
            f"{what}; decode, random resized crop of 224, flip; batches of 32. P, the pictures that two processes "
            "prepare out of memory in a second, measured before each pair: "
            f"{Spread.of([prep for case in cases for prep in case.prep]).show()}; G follows from the first one. The "
            "device of each job is a sleep, G samples/s. `SharedLoader` has 2 workers for all jobs and its pictures, "
            "as fetched, in a cache that holds all; torch's loaders read files in memory and have a worker each. "
            "Bound: min(G, P), and min(G, P/K) for those that share nothing; share: of the bound; waiting: share of "
            "its time that a job waits for "
            f"a batch. One epoch is not timed; {rounds} rounds, ratios within a round.",
            f"Memory of the group, MiB: {_memory([single, *cases[:3]])}. Beside: all files in shared memory but the "
            "cache's, ring included. Mapped: shared memory that the processes of all jobs use (PSS), cache included.",
        ],
        versions=cases[0].found["shared"][0]["versions"],
        raw=[
            {"jobs": case.jobs, "share": case.share, "G": case.device, "P": case.prep, "found": case.found}
            for case in [single, *cases]
        ],
    )


def _extra(result: Json) -> int:
    extra: int = result["memory"]["beside"] - result["ring"]
    return extra


def _memory(cases: list[Case]) -> str:
    words = []
    for case in cases:
        result = case.found["shared"][0]
        sizes = (result["ring"], result["memory"]["beside"], result["memory"]["cache"], result["memory"]["shared_pss"])
        ring, beside, cache, mapped = (f"{size / MIB:.1f}" for size in sizes)
        words.append(
            f"{case.jobs} job{'s' * (case.jobs > 1)}: ring {ring}, beside {beside}, cache {cache}, mapped {mapped}"
        )
    return "; ".join(words)
