"""What the loss of another node costs a job with a store: at once, while it lasts, and until hits come again."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.harness import BenchmarkError, Check, Json, Options, Report, Spread, run_child, say, scratch_folder

NAME = "store_faults"
QUESTION = (
    "A node trains on samples that the other node owns, and in the middle of an epoch that one is killed, frozen, "
    "full or cut off: how many seconds does the epoch lose, how fast is it until the other is back, and how soon are "
    "there hits then?"
)
MODULE = "benchmarks.contenders.store_faults"
SIZE = 60_000
PAUSE = 0.02
BANDWIDTH = 60e6
PREP = 0.002
LOST = 1.0
SLOWER = 1.05
OUTAGES = {"storage": "storage of 60 MB/s", "prep": "prep of 2 ms"}


@dataclass
class Fault:
    """Something that befalls the other node.

    Attributes:
        kind: as the contender knows it.
        what: in words.
        found: what it did.
        error: what failed, or "".
    """

    kind: str
    what: str
    found: Json = field(default_factory=dict)
    error: str = ""

    def lost(self) -> Spread:
        """Seconds by which an epoch with the fault is longer than the one before it."""
        pairs = zip(self.found["fault"], self.found["base"], strict=True)
        return Spread.of([fault - base for fault, base in pairs])

    def slower(self, name: str) -> Spread | None:
        """How many times as long an epoch takes as one without a cache, while the other node is lost."""
        turns = self.found["outage"].get(name)
        return Spread.of([turn["lost"] / turn["plain"] for turn in turns]) if turns else None

    def rejoin(self) -> str:
        times = self.found["rejoin"]
        if not times:
            return "does not come back"
        return "**never**" if None in times else Spread.of(times).show(".2f")

    def row(self) -> list[str]:
        if self.error:
            return [self.what, f"**fails**: `{self.error}`", "", "", "", "", ""]
        slower = [self.slower(name) for name in OUTAGES]
        return [
            self.what,
            Spread.of(self.found["base"]).show(".2f"),
            self.lost().show(".2f"),
            *("" if each is None else each.show(".3f") for each in slower),
            self.rejoin(),
            f"{self.found['wrong']}",
        ]


def _faults() -> list[Fault]:
    return [
        Fault("server killed", "Its server is killed; its supervisor starts another one, with another password."),
        Fault("server frozen", "Its server is stopped (SIGSTOP), then goes on."),
        Fault("server full", "Its server loses all samples and has no room for others, then has room again."),
        Fault("cut off", "The network between is cut, then mended."),
        Fault("password changed", "Its server refuses our password, then ends, and another one is started."),
        Fault("supervisor killed", "Its supervisor is killed, with which its server dies; both are started again."),
        Fault("node killed", "All of its processes are killed."),
    ]


def run(options: Options) -> Report:
    faults = _faults()
    params = {"samples": 600, "batch": 15, "strikes": 3, "pairs": 3}
    if options.quick:
        params = {"samples": 160, "batch": 8, "strikes": 1, "pairs": 1}
    common = params | {"size": SIZE, "pause": PAUSE, "bandwidth": BANDWIDTH, "prep": PREP}
    versions: dict[str, str] = {}
    with scratch_folder() as scratch:
        for fault in faults:
            try:
                result = run_child(MODULE, common | {"kind": fault.kind}, scratch=scratch)
                fault.found = result["found"]
                versions = result["versions"]
            except BenchmarkError as error:
                fault.error = str(error).splitlines()[-1]
            say(f"  {' | '.join(fault.row())}")
    return _report(params, faults, versions)


def _report(params: Json, faults: list[Fault], versions: dict[str, str]) -> Report:
    checks = []
    for fault in faults:
        if fault.error:
            checks.append(Check(f"{fault.kind}: seconds lost in mid-epoch", None, LOST, "<=", failed="fails"))
            continue
        spread = fault.lost()
        text = f"{fault.kind}, default `timeout`: seconds lost in mid-epoch"
        checks.append(Check(text, spread.median, LOST, "<=", ".2f", (spread.low, spread.high)))
        for name, words in OUTAGES.items():
            slower = fault.slower(name)
            if slower is not None:
                text = f"{fault.kind}, until it is back, {words}: time of an epoch over that without a cache"
                checks.append(Check(text, slower.median, SLOWER, "<=", ".3f", (slower.low, slower.high)))
    good = [not fault.error and not fault.found["wrong"] for fault in faults]
    text = "lost nodes: share of the kinds of loss with no exception and no wrong sample"
    checks.append(Check(text, sum(good) / len(good), 1, "==", ".2f"))
    back = [not fault.error and None not in fault.found["rejoin"] for fault in faults if fault.kind != "node killed"]
    text = "lost nodes: share of the kinds of loss after which hits come again"
    checks.append(Check(text, sum(back) / len(back), 1, "==", ".2f"))
    return Report(
        columns=[
            "what happens to the other node",
            "s per epoch before",
            "s lost in mid-epoch",
            *(f"then, {words}: times as long as without a cache" for words in OUTAGES.values()),
            "s until hits come again",
            "wrong samples",
        ],
        rows=[fault.row() for fault in faults],
        checks=checks,
        notes=[
            "Two nodes on one host, `timeout` at its default of 0.25 s, `capacity=0`. One of them reads only samples "
            "that the other one owns, so that nothing hides the loss: "
            f"{params['samples']} of {SIZE // 1000} KB, batches of {params['batch']}, one worker. Lost: an epoch with "
            f"the fault in its middle against the one before, with steps of {PAUSE * 1000:.0f} ms and a source in "
            "memory, so that samples from there cost next to nothing and what is lost is waiting; "
            f"{params['strikes']} times each, but once for the killed node. An epoch before these is not timed: it "
            "fills a server that is empty. Then: whole epochs without steps while the other node stays lost, in turns "
            "with a loader that has no cache, the first epoch of each not counted. Until hits come again: from the "
            "moment at which something was killed, or at which the fault was mended; 0 means that there was no miss.",
            "The network is a process that passes on what comes, and is stopped. Every sample has its id in it, and is "
            "looked at. Medians (lowest to highest).",
        ],
        versions=versions,
        raw=[{"kind": fault.kind, "found": fault.found, "error": fault.error} for fault in faults],
    )
