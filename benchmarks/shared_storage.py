"""Several jobs behind slow storage: each batch prepared once for all of them, or by each for itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.harness import Check, Json, Options, Report, Spread, run_child, say, scratch_folder
from benchmarks.photos import make_photos

NAME = "shared_storage"
QUESTION = (
    "The same jobs behind storage of 60 MB/s for all of them, with a cache for 35% of the data: how fast is each, and "
    "how much do they read?"
)
MODULE = "benchmarks.contenders.shared_jobs"
BANDWIDTH = 60e6
CAPACITY = 0.35
SAMPLES = 480
JOBS = (2, 4, 8)
WHO: dict[str, Json] = {
    "one SharedLoader, cache of 35%": {"who": "shared"},
    "own torch DataLoader, one cache of 35% for all": {"who": "torch"},
    "own torch DataLoader, the same with random replacement": {"who": "torch", "policy": "random"},
}
OURS, OWN, PAGES = WHO
MOST = 1e9
"""G, samples/s, of a device that is never waited for."""


@dataclass
class Case:
    """So many jobs, with a device of one speed.

    Attributes:
        jobs: how many.
        device: G in samples/s; `MOST` for one that is never waited for.
        names: which contenders.
        found: per contender, one result per round.
        prep: P of each round.
    """

    jobs: int
    device: float
    names: tuple[str, ...]
    found: dict[str, list[Json]] = field(default_factory=dict)
    prep: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        return f"{self.jobs} jobs, {'no step' if self.device == MOST else f'G = {self.device:,.0f}'}"

    def rates(self, name: str) -> list[float]:
        return [result["rates"][0] for result in self.found[name]]

    def bounds(self, name: str) -> list[float]:
        """What storage, prep and device allow each job, round by round."""
        among = 1 if name == OURS else self.jobs
        fetch = BANDWIDTH * SAMPLES / max(1, self.found[name][0]["absent"])
        return [min(fetch / among, prep / among, self.device) for prep in self.prep]

    def ratio(self, name: str) -> Spread:
        return Spread.of([a / b for a, b in zip(self.rates(OURS), self.rates(name), strict=True)])

    def bound_of_ratio(self, name: str) -> float:
        return Spread.of([a / b for a, b in zip(self.bounds(OURS), self.bounds(name), strict=True)]).median

    def row(self, name: str) -> list[str]:
        rates, bounds = self.rates(name), self.bounds(name)
        read = Spread.of([result["read"] / result["total"] for result in self.found[name]])
        same = name == OURS
        known = name != PAGES  # what is resident there changes with each sample
        return [
            self.text,
            name,
            f"{read.median:.3f}",
            Spread.of(rates).show(),
            f"{Spread.of(bounds).median:,.0f}" if known else "",
            f"{Spread.of([a / b for a, b in zip(rates, bounds, strict=True)]).median:.2f}" if known else "",
            "1" if same else self.ratio(name).show(".2f"),
            "1" if same else f"{self.bound_of_ratio(name):.2f}" if known else "",
        ]


def run(options: Options) -> Report:
    rounds = 1 if options.quick else 2
    with scratch_folder() as scratch:
        what = make_photos(scratch / "photos", options.data, SAMPLES)
        common = {"photos": str(scratch / "photos"), "ledger": str(scratch / "ledger"), "seconds": 2.0}
        prep = run_child(MODULE, common | {"who": "prep"}, scratch=scratch)["rates"][0]
        cases = [Case(jobs, MOST, (OURS, OWN, PAGES) if jobs == JOBS[-1] else (OURS, OWN)) for jobs in JOBS]
        cases.append(Case(JOBS[-1], round(prep / 4), (OURS, OWN)))
        for number in range(rounds):
            prep = run_child(MODULE, common | {"who": "prep"}, scratch=scratch)["rates"][0]
            say(f"  round {number + 1}: P: {prep:,.0f} samples/s")
            for case in cases:
                case.prep.append(prep)
                for name in case.names:
                    params = {"jobs": case.jobs, "device": case.device, "bandwidth": BANDWIDTH, "capacity": CAPACITY}
                    epochs = 6 if name == OURS and not options.quick else 2
                    result = run_child(MODULE, common | params | {"epochs": epochs} | WHO[name], scratch=scratch)
                    case.found.setdefault(name, []).append(result)
                    say(f"    {case.text}: {name}: {result['rates'][0]:,.0f} samples/s per job")
    return _report(what, rounds, cases)


def _report(what: str, rounds: int, cases: list[Case]) -> Report:
    most, checks = cases[len(JOBS) - 1], []
    for name in (OWN, PAGES):
        ratio = most.ratio(name)
        bound = "" if name == PAGES else f"; bound {most.bound_of_ratio(name):.2f}"
        text = f"60 MB/s, {most.jobs} jobs: samples/s per job, shared over {name}{bound}; paper: 5.6"
        checks.append(Check(text, ratio.median, 5.6, spread=(ratio.low, ratio.high)))
    for case in cases[: len(JOBS)]:
        off = max(abs(result["read"] - result["absent"]) for result in case.found[OURS])
        share = case.found[OURS][0]["absent"] / case.found[OURS][0]["total"]
        text = (
            f"60 MB/s, {case.jobs} jobs, shared: bytes from storage per epoch, away from what is not resident "
            f"({share:.3f} of the data)"
        )
        checks.append(Check(text, off, 0, "==", ",.0f"))
    return Report(
        columns=[
            "jobs",
            "loader",
            "read per epoch / data",
            "samples/s per job",
            "bound",
            "share",
            "shared over this",
            "bound of that",
        ],
        rows=[case.row(name) for case in cases for name in case.names],
        checks=checks,
        notes=[
            f"{what}, behind a `ThrottledSource` whose 60 MB/s all jobs share; decode, random resized crop of 224, "
            f"flip; batches of 32. P: {Spread.of(cases[0].prep).show()} samples/s. The cache holds pictures as "
            "fetched and keeps what came first (minio), or replaces at random, which is how a page cache of that size "
            "is missed. All jobs of the host use one cache. `SharedLoader` has 2 workers for all jobs, torch's loaders "
            "one each. Bound: min(F, P, G) per job, F = 60 MB/s over the bytes of an epoch that are not resident, and "
            "F/K and P/K for those that share no loader. Records lie in blocks and the index counts, so a little less "
            "than 35% fits. "
            f"One epoch, which fills the cache, is not timed; {rounds} rounds, ratios within a round."
        ],
        versions=most.found[OURS][0]["versions"],
        raw=[{"jobs": case.jobs, "G": case.device, "P": case.prep, "found": case.found} for case in cases],
    )
