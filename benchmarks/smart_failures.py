"""Where MONAI's Smart Cache is known to fail: what it does there, and what stallfree's does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness import Check, Json, Options, Report, run_child, say, scratch_folder
from benchmarks.peers import venvs
from benchmarks.smart_probes import BAD, EPOCHS, REPLACE, SIZE, SLOW_SECONDS, TOTAL
from benchmarks.volumes import window

NAME = "smart_failures"
QUESTION = "Where MONAI's Smart Cache is known to fail: what does it do there, and what does stallfree's do?"
WHO = {
    "MONAI, its own DataLoader": ("monai", "benchmarks.peers.monai_probes", {}),
    "stallfree, its own DataLoader": ("", "benchmarks.contenders.smart_probes", {"loader": "stallfree"}),
    "stallfree, torch's DataLoader": ("", "benchmarks.contenders.smart_probes", {"loader": "torch"}),
}


@dataclass(frozen=True)
class Probe:
    """A place where one may fail.

    Attributes:
        name: of the program.
        what: is done, and what should happen.
        judge: whether the facts are as they should be.
        words: the facts in words.
    """

    name: str
    what: str
    judge: Callable[[Json], bool]
    words: Callable[[Json], str]

    def show(self, facts: Json) -> str:
        if "hung" in facts:
            return f"**fails**: hangs (ended after {facts['hung']:.0f} s)"
        passed = self.passed(facts)
        words = _short(facts["error"]) if "error" in facts else self.words(facts)
        return f"{'passes' if passed else '**fails**'}: {words}"

    def passed(self, facts: Json) -> bool:
        return "hung" not in facts and self.judge(facts)


def _short(error: str) -> str:
    """The line that names the file, or the first."""
    lines = error.strip().splitlines() or ["an error without a message"]
    line = next((each for each in lines if f"volume-{BAD}" in each), lines[0])
    return f"`{line if len(line) < 120 else line[:117] + '...'}`"


def _expected(first: int = 0, replace: int = REPLACE) -> list[list[int]]:
    return [sorted(window(TOTAL, SIZE, replace, epoch).tolist()) for epoch in range(first, first + EPOCHS)]


def _moves(name: str, what: str, first: int = 0, replace: int = REPLACE) -> Probe:
    """A probe whose windows must be those that should come."""
    return Probe(
        name,
        what,
        lambda facts: facts.get("windows") == _expected(first, replace),
        lambda facts: _windows_in_words(facts["windows"], _expected(first, replace)),
    )


def _windows_in_words(found: list[list[int]], wanted: list[list[int]]) -> str:
    right = sum(a == b for a, b in zip(found, wanted, strict=True))
    if right == len(wanted):
        return f"the right samples in all {right} epochs"
    doubles = max(len(ids) - len(set(ids)) for ids in found)
    if doubles:
        return f"up to {doubles} of {SIZE} samples of an epoch are there twice"
    if all(ids == found[0] for ids in found):
        return f"the same {SIZE} samples in all {len(found)} epochs"
    return f"the right samples in {right} of {len(wanted)} epochs"


PROBES = (
    Probe(
        "fresh",
        "A random number is drawn for each sample, 2 workers: no two are the same.",
        lambda facts: facts.get("drawn") == facts.get("different"),
        lambda facts: f"{facts['different']} different numbers among {facts['drawn']}",
    ),
    Probe(
        "bad_file",
        "A replacement cannot be read: training stops and names the file.",
        lambda facts: f"volume-{BAD}" in facts.get("error", ""),
        lambda facts: "goes on without a word",
    ),
    _moves("persistent", "`persistent_workers=True`: the window moves."),
    _moves("spawn", "Workers that are spawned: the window moves."),
    _moves("forkserver", "Workers of a fork server: the window moves."),
    _moves("forgotten", "`update_cache` is never called: the window moves."),
    _moves("rate_zero", "`replace_rate=0`, for validation: the same samples in each epoch.", replace=0),
    _moves("restart", "`shutdown` and `start` between two epochs: the window goes on, no sample twice.", first=EPOCHS),
    _moves("resume", "Training starts again from a saved state: the window goes on where it was.", first=EPOCHS),
    Probe(
        "late",
        f"Reading {REPLACE} replacements takes {REPLACE * SLOW_SECONDS:.1f} s, longer than an epoch: training does not "
        "stand still.",
        lambda facts: facts.get("seconds", 1e9) < SLOW_SECONDS,
        lambda facts: f"the longest epoch takes {facts['seconds']:.2f} s",
    ),
    Probe(
        "ranks",
        f"Two ranks of one host go through the same window of {SIZE}: it is not read once per rank.",
        lambda facts: facts.get("reads", 1e9) < 1.5 * SIZE,
        lambda facts: f"{facts['reads']} reads of {facts['files']} files",
    ),
)


def run(options: Options) -> Report:
    limit = 20.0 if options.quick else 60.0
    reason = venvs.why_missing("monai")
    found: dict[str, dict[str, Json]] = {who: {} for who in WHO}
    versions: dict[str, str] = {}
    with scratch_folder() as scratch:
        for probe in PROBES:
            for who, (venv, module, params) in WHO.items():
                if venv and reason:
                    continue
                python = {"python": venvs.python_of(venv)} if venv else {}
                task = {"probe": probe.name, "limit": limit} | params
                result = run_child(module, task, scratch=scratch, **python)
                found[who][probe.name] = result["facts"]
                versions |= result["versions"]
                say(f"  {probe.name}: {who}: {probe.show(result['facts'])}")
    rows = [
        [probe.what, *(probe.show(facts[probe.name]) if facts else str(reason) for facts in found.values())]
        for probe in PROBES
    ]
    checks = [
        Check(f"{who}: share of {len(PROBES)} probes that it passes", _share(facts), 1, "==", ".2f")
        for who, facts in found.items()
        if not WHO[who][0]
    ]
    return Report(
        columns=["what is probed", *WHO],
        rows=rows,
        checks=checks,
        notes=[
            f"{TOTAL} samples, a window of {SIZE}, {REPLACE} replaced per epoch, {EPOCHS} epochs; the same program for "
            "all, each time in a fresh process. With MONAI `start` is called first, and `update_cache` between two "
            "epochs where it is not said otherwise; with stallfree nothing is. Since these epochs take no time, "
            'stallfree waits for replacements (`on_late="wait"`), but where they are slow.'
        ],
        versions=versions,
        raw=found,
    )


def _share(facts: dict[str, Json]) -> float:
    return sum(probe.passed(facts[probe.name]) for probe in PROBES) / len(PROBES)
