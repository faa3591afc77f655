"""The one harness: contenders in turns, each in a fresh process; medians with their spread go to `results/CASE.json`.

    run_case(name, case, options) -> result -> benchmarks/results/NAME.json -> pages.py -> docs/benchmarks/

A ratio is taken within a round, between neighbours in time. A result holds the median over the rounds, and the lowest
and the highest figure.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import venvs

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHILD_SECONDS = 900.0
"""Longest run of one contender."""

Json = dict[str, Any]
Figures = dict[str, Any]


class BenchmarkError(RuntimeError):
    """A contender failed. The message holds the end of its output."""


@dataclass(frozen=True)
class Options:
    """Options of the command line.

    Attributes:
        data: folder with photographs or volumes; None for made-up ones.
        quick: short runs, to see that they work.
        seconds: how long to time a contender in each round, at least.
        minutes: length of the soak.
    """

    data: Path | None = None
    quick: bool = False
    seconds: float = 3.0
    minutes: float = 60.0


@dataclass(frozen=True)
class Contender:
    """One of those that are compared.

    Attributes:
        key: short name.
        title: name in the table.
        run: `module:function`.
        params: parameters of the function, besides those of the case and of the condition.
        venv: environment of a peer; "" for this one.
        tunes: whether it has settings; the fastest is chosen once per condition, before the rounds.
        only: keys of the conditions in which it takes part; all if empty.
        source: folder to import stallfree from; "" for this checkout's.
    """

    key: str
    title: str
    run: str
    params: Json = field(default_factory=dict)
    venv: str = ""
    tunes: bool = False
    only: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Condition:
    """A variant of the task, the same for all contenders. `copies` processes run at once; the slowest counts."""

    key: str
    title: str
    params: Json = field(default_factory=dict)
    copies: int = 1


@dataclass(frozen=True)
class Figure:
    """A column of the table. `less`: whether less is better."""

    title: str
    format: str = ",.0f"
    less: bool = False


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        question: in one sentence.
        setup: how it is measured.
        contenders: those that are compared.
        figures: the columns, by the keys of what contenders return; the first one is compared and drawn.
        conditions: variants of the task.
        ours: key of the contender whose first figure is compared with the others'; "" if nothing is compared.
        subject: its name in the title of that column.
        params: parameters for all contenders.
        quick: what replaces them in a short run.
        rounds: how often each contender runs; once in a short run.
        prepare: makes the data in a folder and returns more parameters; "about" says what the data are.
        needs: returns why the case cannot run here, or None.
        limit: longest run of one contender, in seconds.
    """

    question: str
    setup: str
    contenders: Sequence[Contender]
    figures: dict[str, Figure]
    conditions: Sequence[Condition] = (Condition("", ""),)
    ours: str = "stallfree"
    subject: str = "stallfree"
    params: Json = field(default_factory=dict)
    quick: Json = field(default_factory=dict)
    rounds: int = 7
    prepare: Callable[[Path, Options], Json] | None = None
    needs: Callable[[], str | None] = lambda: None
    limit: float = CHILD_SECONDS


def run_case(name: str, case: Case, options: Options) -> Json:
    """Run all contenders of `case` in turns and return the result. Raises `BenchmarkError`."""
    if reason := case.needs():
        raise BenchmarkError(reason)
    rounds = 1 if options.quick else case.rounds
    params = {"seconds": options.seconds, "short": options.quick} | case.params
    runs: dict[tuple[str, str], list[Figures]] = {}
    missing: dict[str, str | None] = {each.key: each.venv and venvs.why_missing(each.venv) for each in case.contenders}
    notes: list[str] = []
    versions: dict[str, str] = {}
    with scratch_folder() as scratch:
        params |= {"folder": str(scratch)} | (case.prepare(scratch, options) if case.prepare else {})
        about = params.pop("about", "")
        for condition in case.conditions[: 1 if options.quick else None]:
            entries = [each for each in case.contenders if not each.only or condition.key in each.only]
            entries = [each for each in entries if not missing[each.key]]
            for position, entry in enumerate(entries):
                if entry.tunes:
                    best = _run(entry, condition, params | {"setting": "", "seconds": 1.0}, scratch, case)["figures"]
                    entries[position] = replace(entry, params=entry.params | {"setting": best["setting"]})
                    where = f", {condition.title}" if condition.title else ""
                    notes.append(f"{entry.title}{where}: best of {best['tried']} settings: {best['setting']}.")
            for number in range(rounds):
                turn = number % max(1, len(entries))
                for entry in entries[turn:] + entries[:turn]:
                    output = _run(entry, condition, params | {"round": number}, scratch, case)
                    versions |= output["versions"]
                    runs.setdefault((condition.key, entry.key), []).append(output["figures"])
                    say(f"  {number + 1}: {condition.title} {entry.title}: {_short(output['figures'], case)}")
    return {
        "name": name,
        "question": case.question,
        "setup": " ".join(filter(None, [about, case.setup, f"{rounds} rounds." if rounds > 1 else ""])),
        "date": f"{datetime.date.today():%Y-%m}",
        "machine": machine(),
        "versions": versions,
        **_table(case, runs, missing),
        "notes": notes,
    }


def _run(entry: Contender, condition: Condition, params: Json, scratch: Path, case: Case) -> Json:
    """Run a contender in `condition.copies` processes and return figures and versions; the worst copy's figures."""
    params = params | condition.params | entry.params
    params |= case.quick if params["short"] else {}
    with ThreadPoolExecutor(condition.copies) as pool:
        outputs = list(pool.map(lambda _: run_child(entry, params, scratch, case.limit), range(condition.copies)))
    for output in outputs:
        values = output["figures"].items()
        output["figures"] = {
            key: statistics.median(value) if isinstance(value, list) else value for key, value in values
        }
    first = next(iter(case.figures.items()))
    worst = max if first[1].less else min
    return worst(outputs, key=lambda output: output["figures"].get(first[0], 0.0))


def run_child(entry: Contender, params: Json, scratch: Path, limit: float = CHILD_SECONDS) -> Json:
    """Run one contender in a fresh process and return the JSON of its last line. Raises `BenchmarkError`."""
    source = entry.source or str(ROOT / "src")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [source, str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "STALLFREE_ROOT": str(scratch / "stallfree"),
        "PYTHONWARNINGS": "ignore",
    }
    python = venvs.python_of(entry.venv) if entry.venv else sys.executable
    command = [str(python), "-m", "benchmarks.child", entry.run, json.dumps(params)]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{entry.run} has not ended for {limit:.0f} s") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        tail = "\n".join(done.stderr.strip().splitlines()[-25:])
        raise BenchmarkError(f"{entry.run} ended with {done.returncode}:\n{tail}")
    output: Json = json.loads(lines[-1])
    return output


# -- the table --------------------------------------------------------------------------------------------------------


def _table(case: Case, runs: dict[tuple[str, str], list[Figures]], missing: dict[str, str | None]) -> Json:
    labels = [["", ""]] * any(each.title for each in case.conditions) + [["contender", ""]]
    columns = labels + [[each.title, each.format] for each in case.figures.values()]
    compares = len(case.contenders) > 1 and any(each.key == case.ours for each in case.contenders)
    if compares:
        columns.append([f"{case.subject}: times as fast as this", ".2f"])
    rows: list[list[Any]] = []
    for condition in case.conditions:
        for entry in case.contenders:
            if entry.only and condition.key not in entry.only:
                continue
            label = ([condition.title] if len(labels) > 1 else []) + [entry.title]
            measured = runs.get((condition.key, entry.key), [])
            if not measured:
                if reason := missing[entry.key]:
                    rows.append([*label, reason, *[""] * (len(columns) - len(label) - 1)])
                continue
            cells = [spread([each[key] for each in measured if key in each]) for key in case.figures]
            if compares:
                cells.append(_ratio(case, entry.key, runs.get((condition.key, case.ours), []), measured))
            rows.append(label + cells)
    return {"columns": columns, "rows": rows, "bars": len(labels)}


def _ratio(case: Case, key: str, ours: list[Figures], theirs: list[Figures]) -> Any:
    """Return how many times as fast ours is, round by round."""
    name, figure = next(iter(case.figures.items()))
    if key == case.ours or not ours:
        return ""
    pairs = [(mine[name], other[name]) for mine, other in zip(ours, theirs, strict=True)]
    return spread([other / mine if figure.less else mine / other for mine, other in pairs])


def spread(values: Sequence[float]) -> Any:
    """Return the median, the lowest and the highest value; "" without values."""
    return [_rounded(each) for each in (statistics.median(values), min(values), max(values))] if values else ""


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _short(figures: Figures, case: Case) -> str:
    return ", ".join(
        f"{figures[key]:{each.format}} {each.title}" for key, each in case.figures.items() if key in figures
    )


# -- baseline ---------------------------------------------------------------------------------------------------------


def against_baseline(case: Case, source: str) -> Case:
    """Return `case` with stallfree's contender of this checkout and that of `source` only, for measuring a change."""
    chosen = [each for each in case.contenders if each.key == case.ours] or list(case.contenders)
    baseline = [
        replace(each, key=f"{each.key} before", title=f"{each.title}, before", source=source) for each in chosen
    ]
    return replace(case, contenders=[*baseline, *chosen])


# -- machine and files ------------------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """Return processor, cores, memory and kernel."""
    model, memory = platform.processor() or platform.machine(), 0
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            memory = int(line.split()[1]) * 1024
    return {
        "processor": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": platform.release().split("-")[0],
    }


def as_text(result: Json) -> str:
    """Return the JSON of a result, with one line per column, row and note."""
    lines = []
    for key, value in result.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join("  " + json.dumps(each, ensure_ascii=False) for each in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder in memory, removed afterwards."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
