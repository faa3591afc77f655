"""Batches of 64 pictures for one and for three consumers, against what memory allows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.contender import Task, make_samples
from benchmarks.harness import BenchmarkError, Check, Json, Options, Report, Spread, run_child, say, scratch_folder
from benchmarks.peers import venvs

NAME = "shared_ceiling"
QUESTION = (
    "64x3x224x224 bytes per batch, prepared and in memory, for 1 and 3 processes that take every batch: how many "
    "batches/s come, as a share of what one thread copies?"
)
OURS = "benchmarks.contenders.shared_ceiling"
PEER = "benchmarks.peers.tensorsocket_bench"
SIDE, BATCH, SAMPLES, WORKERS = 224, 64, 3200, 2
CONSUMERS = (1, 3)


@dataclass
class Way:
    """One way from the pictures to the consumers.

    Attributes:
        name: as it stands in the table.
        module: started with `python -m`.
        params: what it is given.
        venv: the environment of a peer; "" for our own.
        found: by number of consumers, one result per round.
        tried: samples/s of each of its settings.
        failed: why it has no figure, now or in some rounds.
    """

    name: str
    module: str
    params: Json
    venv: str = ""
    found: dict[int, list[Json]] = field(default_factory=lambda: {count: [] for count in CONSUMERS})
    tried: dict[str, float] = field(default_factory=dict)
    failed: str = ""

    def run(self, params: Json, scratch: Path) -> Json:
        python = {"python": venvs.python_of(self.venv)} if self.venv else {}
        return run_child(self.module, params | self.params, scratch=scratch, **python)

    def tune(self, common: Json, scratch: Path) -> None:
        """Choose the best setting of a peer."""
        if self.venv and (reason := venvs.why_missing(self.venv)):
            self.failed = reason
        elif self.venv:
            say(f"  {self.name}: looking for its best setting")
            tuning = self.run(common | {"setting": "tune", "seconds": 1.0}, scratch)
            self.tried = tuning["tried"]
            self.params = self.params | {"setting": tuning["setting"]}

    def spread(self, consumers: int, use: str, copies: list[float]) -> Spread | None:
        """Batches/s over those of memcpy in the same round."""
        pairs = [(result[use], copies[result["round"]]) for result in self.found[consumers]]
        return Spread.of([rate / copy for rate, copy in pairs]) if pairs else None

    def row(self, copies: list[float]) -> list[str]:
        cells = [self.name]
        for use in ("view", "read"):
            for consumers in CONSUMERS:
                ratio = self.spread(consumers, use, copies)
                if ratio is None:
                    cells.append(self.failed)
                    continue
                rate = Spread.of([result[use] for result in self.found[consumers]]).median
                cells.append(f"{rate:,.0f}: {ratio.show('.3f')}")
        return cells


def ways() -> list[Way]:
    """Everyone."""
    return [
        Way("stallfree SharedLoader, gathered out of the cache", OURS, {"who": "shared"}),
        Way("bare ring, filled by memcpy (the limit)", OURS, {"who": "ring"}),
        Way("bare ring, filled by a gather", OURS, {"who": "gather"}),
        Way("torch queue, a fresh tensor per batch", OURS, {"who": "queue"}),
        Way("TensorSocket", PEER, {"packing": "own"}, "tensorsocket"),
        Way("TensorSocket, tensors by name through shared memory", PEER, {"packing": "shared"}, "tensorsocket"),
    ]


def run(options: Options) -> Report:
    rounds, seconds = (1, 0.5) if options.quick else (2, 1.0)
    everyone, copies, versions = ways(), [], {}
    with scratch_folder() as scratch:
        task = Task(SIDE, SAMPLES, BATCH, WORKERS, seconds, str(scratch))
        make_samples(task)
        common = asdict(task)
        for way in everyone:
            way.tune(common, scratch)
        for number in range(rounds):
            copy = run_child(OURS, common | {"who": "memcpy", "consumers": 1}, scratch=scratch)
            copies.append(copy["view"])
            say(f"  round {number + 1}: memcpy: {copies[-1]:,.0f} batches/s")
            for way in everyone:
                for consumers in CONSUMERS:
                    result = _measure(way, common | {"consumers": consumers}, scratch)
                    if result:
                        way.found[consumers].append(result | {"round": number})
                        versions |= result["versions"]
    return _report(rounds, everyone, copies, versions)


def _measure(way: Way, params: Json, scratch: Path) -> Json | None:
    """One result. A peer that stands still is noted."""
    if way.venv and not way.tried:
        return None
    try:
        result = way.run(params, scratch)
    except BenchmarkError:
        if not way.venv:
            raise
        way.failed = "stood still"
        say(f"    {way.name}, {params['consumers']} consumers: stood still")
        return None
    say(f"    {way.name}, {params['consumers']} consumers: {result['view']:,.0f} viewed, {result['read']:,.0f} read")
    return result


def _report(rounds: int, everyone: list[Way], copies: list[float], versions: dict[str, str]) -> Report:
    checks = [
        _check(everyone[0], limit, consumers, use)
        for limit in everyone[1:3]
        for consumers in CONSUMERS
        for use in ("view", "read")
    ]
    return Report(
        columns=["batches/s of each consumer: share of memcpy", *_columns()],
        rows=[way.row(copies) for way in everyone],
        checks=checks,
        notes=[
            f"{SAMPLES:,} pictures of 3x224x224 bytes in memory, batches of {BATCH} (9.6 MB), another random order "
            f"each epoch. memcpy: one thread copies a batch into a standing buffer, both in its caches: "
            f"{Spread.of(copies).show()} batches/s. View: a consumer touches nothing in its batch; read: it copies the "
            "batch into a buffer of its own. Consumers are processes that begin together. A bare ring is 8 standing "
            "slots in shared memory and their numbers over pipes. The torch queue holds 4 batches for each consumer. "
            f"{rounds} rounds, ratios within a round.",
            "TensorSocket gets each batch gathered into a standing buffer. Of its own accord it pickles what lies in "
            "main memory into its socket; the other row hands tensors over by name, through the arguments that it has "
            "for own packing, and uses its pool of buffers as on a GPU (see the next table for what may happen then).",
            *(
                f"{way.name}: best of {len(way.tried)} settings: {way.params['setting']}."
                for way in everyone
                if way.tried
            ),
            *(_tries(way) for way in everyone if way.tried),
        ],
        versions=versions,
        raw={"memcpy": copies} | {way.name: {"tried": way.tried, "found": way.found} for way in everyone},
    )


def _check(ours: Way, limit: Way, consumers: int, use: str) -> Check:
    """Ours over a bare ring, round by round."""
    pairs = zip(ours.found[consumers], limit.found[consumers], strict=True)
    spread = Spread.of([a[use] / b[use] for a, b in pairs])
    who = f"{consumers} consumers that {use}" if consumers > 1 else f"one consumer that {use}s"
    text = f"64x3x224x224, {who}: batches/s, SharedLoader over {limit.name}"
    return Check(text, spread.median, 0.9, spread=(spread.low, spread.high))


def _tries(way: Way) -> str:
    """How often a peer had to begin anew."""
    tries = [result["tries"] for results in way.found.values() for result in results]
    still = sum(tries) - len(tries)
    words = f"{way.name} stood still and was started again {still} times in {len(tries)} runs"
    return f"{words}; some runs gave nothing." if way.failed else f"{words}."


def _columns() -> list[str]:
    return [f"{use}, {count} consumer{'s' * (count > 1)}" for use in ("view", "read") for count in CONSUMERS]
