"""Sixteen processes that make a store at once, and what is left of it when all of them are killed."""

from __future__ import annotations

from benchmarks.harness import Check, Json, Options, Report, Spread, run_child, say, scratch_folder

NAME = "store_start"
QUESTION = (
    "16 processes make a store at once: how long until the last one is ready, how many servers run then, and how long "
    "until nothing is left of them when all processes are killed?"
)
MODULE = "benchmarks.contenders.store_start"
GONE = 1.0
CASES = {"one node, 1 process": (1, 1), "one node, 16 processes": (1, 16), "two nodes, 8 processes each": (2, 8)}


def run(options: Options) -> Report:
    times = 1 if options.quick else 5
    found: dict[str, list[Json]] = {}
    versions: dict[str, str] = {}
    with scratch_folder() as scratch:
        for what, (nodes, ranks) in CASES.items():
            result = run_child(MODULE, {"nodes": nodes, "ranks": ranks, "times": times}, scratch=scratch)
            found[what], versions = result["found"], result["versions"]
            say(f"  {' | '.join(_row(what, found[what]))}")
    checks = []
    for what, each in found.items():
        nodes = CASES[what][0]
        most = max(
            (max(run["servers"], run["found"], run["started"]) for run in each),
            key=lambda servers: abs(servers - nodes),
        )
        checks.append(Check(f"a store made by {what}: servers per node, the most", most / nodes, 1, "==", ".2f"))
        gone = Spread.of([run["gone"] for run in each])
        text = f"a store made by {what}, all killed: seconds until no server, supervisor and folder is left"
        checks.append(Check(text, gone.median, GONE, "<=", ".2f", (gone.low, gone.high)))
    return Report(
        columns=["who", "s until the last is ready", "s for the quickest", "servers", "s until nothing is left"],
        rows=[_row(what, each) for what, each in found.items()],
        checks=checks,
        notes=[
            "The processes are forked from one that has imported torch, and begin together. Ready: `RedisStore(...)` "
            "has returned. With two nodes that contains the exchange of their addresses. Servers: the processes that "
            "run, the different ones that the processes found, and the times that a process has started one; the most "
            "of these. All killed: SIGKILL to all of them at once, then the process table and the folders are looked "
            f"at every 2 ms. {times} times each; median (lowest to highest)."
        ],
        versions=versions,
        raw=found,
    )


def _row(what: str, found: list[Json]) -> list[str]:
    spreads = {name: Spread.of([run[name] for run in found]) for name in ("ready", "first", "gone")}
    servers = sorted({run["servers"] for run in found})
    return [
        what,
        spreads["ready"].show(".2f"),
        spreads["first"].show(".2f"),
        " or ".join(map(str, servers)),
        spreads["gone"].show(".2f"),
    ]
