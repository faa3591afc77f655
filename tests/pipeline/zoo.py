"""The zoo: transforms and data sets of all kinds, in every cache. Judges whether a cache freezes what is random.

    python tests/pipeline/zoo.py --runs 20            all entries, all ways: two tables. The first run takes all ways,
                                                      the others the quick ones, and two of the slow ones in turn
    python tests/pipeline/zoo.py --only rare --ways smart

An entry that is random is *frozen* when its samples stay the same over epochs where they differ without a cache. An
entry that is deterministic is *cached* when its values are right and its code does not run in the second and third
epoch. The same loader with as many workers, without a cache, is what each way is compared with.
"""

from __future__ import annotations

import argparse
import collections
import gc
import itertools
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # so that the entries are found when this file is started

import zoo_datasets  # noqa: F401
import zoo_draws  # noqa: F401
import zoo_indirect  # noqa: F401
import zoo_libraries  # noqa: F401
import zoo_seeded  # noqa: F401
import zoo_state  # noqa: F401
import zoo_steady  # noqa: F401
from zoo_entry import ENTRIES, Entry
from zoo_ways import PLAIN, WAYS, Epochs, Looked, Task, make, quiet, sealed, stacks

MOST_CALLS = 0.1
"""Calls per sample and epoch after the first, up to which an entry counts as cached."""

FEWEST_CHANGES = 4
"""An entry with fewer changes without a cache is too still to be judged as a whole."""

CACHING = ("prepared, ", "auto, ", "smart, ")
"""The ways in which a steady step is to be cached."""

QUICK = ("prepared, sf 0", "auto, torch 0", "whole, sf 0", "whole, torch 0", "smart, sf 0")
"""The ways that every run takes; the others are taken in turn after the first run."""


@dataclass(frozen=True)
class Verdict:
    """What one way did to one entry in one run.

    Attributes:
        entry, way: which.
        what: "fresh" or "frozen" for a random entry; "cached" or "anew" for a steady one, or the steady step before a
            random one; "right" for one that may be either; "refused" for a data set that was not taken; "wrong" for
            other values; "error".
        note: details.
    """

    entry: Entry
    way: str
    what: str
    note: str = ""


def judge(entry: Entry, run: int = 0, ways: Sequence[str] = tuple(WAYS)) -> list[Verdict]:
    """The verdicts on `entry` in `ways`. A random entry with a steady first step has two for each."""
    verdicts: list[Verdict] = []
    known: dict[str, Epochs] = {}
    with quiet():
        right = _samples(entry)
        stacked = stacks(right)
        expected = [sealed(sample) for sample in right]
        for way in ways:
            like, read = WAYS[way]
            if _left_out(entry, way, like):
                continue
            task = Task(entry, stacked, 1000 * run + 1, entry.kind == "steady" or entry.prefix)
            try:
                if entry.kind == "random" and like not in known:
                    known[like] = PLAIN[like](task).epochs
                looked = read(task)
            except Exception as error:
                verdicts.append(Verdict(entry, way, "error", f"{type(error).__name__}: {error}"))
                continue
            verdicts += _verdicts(entry, way, looked, known.get(like, []), expected)
    return verdicts


def _left_out(entry: Entry, way: str, like: str) -> bool:
    """Whether nothing can be said of `entry` in this way, or another way says the same."""
    if entry.local and (not like.endswith(" 0") or way == "shared"):
        return True
    if way == "shared" and entry.kind != "random":
        return True
    return entry.records is None and way.startswith("prepared, ")


def _samples(entry: Entry) -> list[Any]:
    """All samples, read once from a fresh one."""
    data = make(entry).plain
    return [data[id] for id in range(len(data))]


def _verdicts(entry: Entry, way: str, looked: Looked, plain: Epochs, expected: list[Any]) -> Iterable[Verdict]:
    if looked.refused:
        yield Verdict(entry, way, "refused", looked.refused)
        return
    if entry.kind == "random":
        problem = frozen(entry, plain, looked.epochs)
        yield Verdict(entry, way, "frozen" if problem else "fresh", problem)
    elif any(epoch != expected for epoch in looked.epochs):
        yield Verdict(entry, way, "wrong", "values differ from those without a cache")
        return
    if entry.kind == "either":
        yield Verdict(entry, way, "right")
    if looked.calls >= 0:
        note = f"{looked.calls:.2f} calls per sample" + (f"; {looked.decision}" if looked.decision else "")
        yield Verdict(entry, way, "anew" if looked.calls > MOST_CALLS else "cached", note)


def frozen(entry: Entry, plain: Epochs, found: Epochs) -> str:
    """How the samples of three epochs are frozen, in words; "" if they are not. `plain` are those without a cache."""
    ids = [id for id in range(len(plain[0])) if entry.draws(id)]
    there, here = _changes(plain, ids), _changes(found, ids)
    if there >= FEWEST_CHANGES and here < (1 if entry.base else there / 2):
        return f"{here} changes between epochs, {there} without a cache"
    if entry.base is not None:
        bases = [sealed(entry.base(record)) for record in _records(entry)]
        stuck = [id for id in ids if len({epoch[id] for epoch in found}) == 1 and found[0][id] != bases[id]]
        return f"what was drawn for {stuck[:5]} is kept" if stuck else ""
    usual, stuck = _still(plain, ids), _still(found, ids)
    spare = 4 * math.sqrt(len(usual)) + 3 if entry.coarse else 0
    if len(stuck) > len(usual) + spare:
        return f"{len(stuck)} samples stay the same, such as {stuck[:5]}; {len(usual)} without a cache"
    return ""


def _changes(epochs: Epochs, ids: list[int]) -> int:
    """Samples that differ from one epoch to the next."""
    return sum(before[id] != after[id] for before, after in itertools.pairwise(epochs) for id in ids)


def _still(epochs: Epochs, ids: list[int]) -> list[int]:
    """Samples that are the same in all epochs."""
    return [id for id in ids if all(epoch[id] == epochs[0][id] for epoch in epochs)]


def _records(entry: Entry) -> list[Any]:
    return entry.records() if entry.records is not None else entry.make().records


# -- tables ----------------------------------------------------------------------------------------------------------


def report(verdicts: list[Verdict], runs: int) -> str:
    """Two tables: the random entries that were frozen, and the steady ones that were cached."""
    return "\n".join([*_frozen_table(verdicts, runs), "", *_cached_table(verdicts), "", *_others(verdicts)])


def _frozen_table(verdicts: list[Verdict], runs: int) -> list[str]:
    random = _by_entry(v for v in verdicts if v.entry.kind == "random" and v.what in ("fresh", "frozen", "refused"))
    counts = {name: collections.Counter(v.way for v in found if v.what == "frozen") for name, found in random.items()}
    hit = {name: ways for name, ways in counts.items() if ways}
    lines = [f"frozen: {len(hit)} of {len(random)} random entries in {runs} runs each"]
    for name, ways in sorted(hit.items()):
        tried = collections.Counter(v.way for v in random[name])
        worst = max(ways, key=lambda way: ways[way] / tried[way])
        lines.append(f"  {name:46} {ways[worst]:3} of {tried[worst]} times in `{worst}`; {_short(ways)}")
    return lines


def _cached_table(verdicts: list[Verdict]) -> list[str]:
    found = _by_entry(v for v in verdicts if v.entry.kind == "steady")
    ways = list(dict.fromkeys(v.way for vs in found.values() for v in vs))
    bad = {name: [v for v in vs if v.what != "cached" and v.way.startswith(CACHING)] for name, vs in found.items()}
    good = sum(not vs for vs in bad.values())
    share = f" ({good / len(found):.0%})" if found else ""
    lines = [f"deterministic and cached: {good} of {len(found)} entries{share}"]
    lines += [
        f"  {name:46} {_short(collections.Counter(v.way for v in vs))}: {vs[0].what}" for name, vs in bad.items() if vs
    ]
    for way in ways:
        there = {v.entry.name: set() for vs in found.values() for v in vs if v.way == way}
        for vs in found.values():
            for v in vs:
                if v.way == way:
                    there[v.entry.name].add(v.what)
        lines.append(f"  {way:20} {sum(what == {'cached'} for what in there.values())} of {len(there)}")
    before = _by_entry(
        v for v in verdicts if v.entry.prefix and v.what in ("cached", "anew") and v.way.startswith(CACHING)
    )
    kept = sum(all(v.what == "cached" for v in vs) for vs in before.values())
    lines.append(f"steady first step of a random entry cached: {kept} of {len(before)}")
    lines += [f"  {name}" for name, vs in before.items() if any(v.what == "anew" for v in vs)]
    return lines


def _others(verdicts: list[Verdict]) -> list[str]:
    """What is wrong besides: values, errors, and data sets that were refused though they are deterministic."""
    lines = []
    for what in ("wrong", "error"):
        found = _by_entry(v for v in verdicts if v.what == what)
        lines.append(f"{what}: {len(found)} entries")
        lines += [
            f"  {name:46} {_short(collections.Counter(v.way for v in vs))}: {vs[0].note[:200]}"
            for name, vs in found.items()
        ]
    found = _by_entry(v for v in verdicts if v.what == "refused" and v.entry.kind == "steady")
    lines.append(f"deterministic data sets refused: {len(found)}")
    lines += [
        f"  {name:46} {_short(collections.Counter(v.way for v in vs))}: {vs[0].note[:160]}"
        for name, vs in found.items()
    ]
    return lines


def _by_entry(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.entry.name, []).append(verdict)
    return found


def _short(ways: collections.Counter[str]) -> str:
    return f"{len(ways)} ways: {'; '.join(ways)}" if len(ways) > 1 else next(iter(ways), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1, help="how often each entry is tried in each way")
    parser.add_argument("--only", default="", help="entries whose name or kind contains one of these words")
    parser.add_argument("--ways", default="", help="ways whose name contains one of these texts, divided by ';'")
    parser.add_argument("--thorough", action="store_true", help="all ways in every run, the slow ones too")
    parser.add_argument("--list", action="store_true", help="name all entries and ways")
    given = parser.parse_args()
    words, texts = (
        given.only.replace(",", " ").split(),
        [text.strip() for text in given.ways.split(";") if text.strip()],
    )
    entries = [e for e in ENTRIES if not words or any(word in f"{e.kind} {e.name}" for word in words)]
    ways = [way for way in WAYS if not texts or any(text in way for text in texts)]
    if given.list:
        print("\n".join([f"{e.kind:7} {e.name}" for e in entries] + ways))
        return 0
    verdicts = run_all(entries, ways, given.runs, _say, given.thorough)
    print(report(verdicts, given.runs))
    return int(any(v.what in ("frozen", "wrong", "error") for v in verdicts))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ways_of(run: int, ways: Sequence[str]) -> list[str]:
    """All in the first run; then those that are quick, and two of the others in turn."""
    slow = [way for way in ways if way not in QUICK]
    turn = {slow[(2 * run + number) % len(slow)] for number in range(2)} if slow else set()
    return [way for way in ways if run == 0 or way in QUICK or way in turn]


def run_all(
    entries: Sequence[Entry], ways: Sequence[str], runs: int, say: Callable[[str], None], thorough: bool = False
) -> list[Verdict]:
    """All verdicts. After the first run, the steady entries are known."""
    verdicts: list[Verdict] = []
    folder = tempfile.mkdtemp(prefix="stallfree-test-zoo-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    before = os.environ.get("STALLFREE_ROOT")
    os.environ["STALLFREE_ROOT"] = folder
    gc.freeze()  # so that collecting is quick
    try:
        for run in range(runs):
            began = time.monotonic()
            for entry in entries:
                if run == 0 or entry.kind == "random":
                    verdicts += judge(entry, run, ways if thorough else ways_of(run, ways))
                    gc.collect()
            say(f"run {run + 1} of {runs}: {time.monotonic() - began:.0f} s")
    finally:
        if before is None:
            del os.environ["STALLFREE_ROOT"]
        else:
            os.environ["STALLFREE_ROOT"] = before
        shutil.rmtree(folder, ignore_errors=True)
    return verdicts


if __name__ == "__main__":
    sys.exit(main())
