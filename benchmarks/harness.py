"""The one harness: contenders in turns, each in a fresh process, and what becomes of their figures.

    case.run(options) -> Report -> benchmarks/results/NAME.json -> docs/benchmarks/results/NAME.md, charts/NAME.svg

A ratio is taken within a round, between neighbours in time, and what is reported is the median over the rounds with the
lowest and the highest.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.charts import chart
from benchmarks.peers import venvs

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "benchmarks"
CHILD_SECONDS = 900.0
"""Longest run of one contender."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        data: folder with pictures, or None to make some.
        quick: fewer and shorter runs, to see that they work; the pages are left as they are.
        minutes: length of the soak; its own if None.
    """

    data: Path | None = None
    quick: bool = False
    minutes: float | None = None

    @property
    def rounds(self) -> int:
        """How often each contender runs."""
        return 2 if self.quick else 7

    @property
    def seconds(self) -> float:
        """How long a contender is timed per round, at least."""
        return 0.5 if self.quick else 3.0


class BenchmarkError(RuntimeError):
    """A contender failed. The message holds the end of what it wrote."""


# -- running ----------------------------------------------------------------------------------------------------------


def run_child(
    module: str,
    params: Json,
    *,
    scratch: Path,
    python: str | Path = sys.executable,
    seconds: float = CHILD_SECONDS,
) -> Json:
    """Run `python -m module PARAMS` in a fresh process; the JSON on the last line of its standard output."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "STALLFREE_ROOT": str(scratch / "stallfree"),
        "PYTHONWARNINGS": "ignore",
    }
    command = [str(python), "-m", module, json.dumps(params)]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{module} has not ended for {seconds:.0f} s") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        tail = "\n".join(done.stderr.strip().splitlines()[-25:])
        raise BenchmarkError(f"{module} ended with {done.returncode}:\n{tail}")
    result: Json = json.loads(lines[-1])
    return result


@dataclass
class Contender:
    """One of those that are compared.

    Attributes:
        name: as it stands in the table.
        module: started with `python -m`.
        params: what it is given, on top of what all are given.
        venv: the environment of a peer; "" for our own.
        tunes: whether it has settings to choose from; the best is chosen once, before the rounds.
        missing: why it cannot run.
        tried: samples/s of each of its settings.
        results: what it gave, one per round.
    """

    name: str
    module: str
    params: Json = field(default_factory=dict)
    venv: str = ""
    tunes: bool = False
    missing: str | None = None
    tried: dict[str, float] = field(default_factory=dict)
    results: list[Json] = field(default_factory=list)

    def run(self, common: Json, scratch: Path) -> Json:
        python = venvs.python_of(self.venv) if self.venv else sys.executable
        return run_child(self.module, common | self.params, scratch=scratch, python=python)

    def rates(self) -> list[float]:
        """The median rate of each round."""
        return [statistics.median(result["rates"]) for result in self.results]


def alternate(contenders: Sequence[Contender], common: Json, rounds: int, scratch: Path) -> None:
    """Run A B C A B C ...; each gets its `results`, or the reason why it is `missing`."""
    for contender in contenders:
        if contender.venv:
            contender.missing = venvs.why_missing(contender.venv)
        if contender.tunes and not contender.missing:
            say(f"  {contender.name}: looking for its best setting")
            tuning = contender.run(common | {"setting": "tune", "seconds": min(1.0, common["seconds"])}, scratch)
            contender.tried = tuning["tried"]
            contender.params = contender.params | {"setting": tuning["setting"]}
    for round_ in range(rounds):
        for contender in contenders:
            if contender.missing:
                continue
            result = contender.run(common, scratch)
            contender.results.append(result)
            say(f"  round {round_ + 1}: {contender.name}: {statistics.median(result['rates']):,.0f} samples/s")


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


# -- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of some figures, and the range of their middle half."""

    median: float
    low: float
    high: float
    iqr: float

    @staticmethod
    def of(figures: Sequence[float]) -> Spread:
        quarters = statistics.quantiles(figures, n=4, method="inclusive") if len(figures) > 1 else [figures[0]] * 3
        return Spread(statistics.median(figures), min(figures), max(figures), quarters[2] - quarters[0])

    def show(self, form: str = ",.0f") -> str:
        """Such as `12,300 (11,900 to 12,800)`."""
        if self.low == self.high:
            return format(self.median, form)
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def ratios(ours: Contender, theirs: Contender) -> Spread:
    """Ours over theirs, round by round."""
    return Spread.of([a / b for a, b in zip(ours.rates(), theirs.rates(), strict=True)])


@dataclass(frozen=True)
class Check:
    """A figure beside what was asked of it.

    Attributes:
        what: in words.
        value: the figure (a median).
        wanted: the bound.
        sense: ">=", "<=", "<" or "==".
        form: how to print both.
        spread: lowest and highest, if there are several.
        failed: why there is no figure.
    """

    what: str
    value: float | None
    wanted: float
    sense: str = ">="
    form: str = ".2f"
    spread: tuple[float, float] | None = None
    failed: str = ""

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return {
            ">=": self.value >= self.wanted,
            "<=": self.value <= self.wanted,
            "<": self.value < self.wanted,
            "==": self.value == self.wanted,
        }[self.sense]

    def row(self) -> list[str]:
        words = {">=": "at least", "<=": "at most", "<": "below", "==": "exactly"}
        figure = self.failed or "not measured" if self.value is None else format(self.value, self.form)
        if self.spread is not None and self.value is not None:
            figure += f" ({self.spread[0]:{self.form}} to {self.spread[1]:{self.form}})"
        verdict = "not measured" if self.value is None else "yes" if self.met else "no"
        return [self.what, figure, f"{words[self.sense]} {self.wanted:{self.form}}", verdict]


def check_ratio(what: str, ours: Contender, theirs: Contender, wanted: float) -> Check:
    """The check that ours over theirs is at least `wanted`."""
    if ours.missing or theirs.missing:
        return Check(what, None, wanted, failed=ours.missing or theirs.missing or "")
    spread = ratios(ours, theirs)
    return Check(what, spread.median, wanted, spread=(spread.low, spread.high))


@dataclass
class Report:
    """What a case found.

    Attributes:
        columns, rows: the table.
        checks: what was asked for, beside what is.
        notes: sentences below the table.
        versions: of what took part.
        raw: every figure, written beside the result of a quick run.
    """

    columns: list[str]
    rows: list[list[str]]
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    raw: Any = None


class Case(Protocol):
    """A module with one question."""

    NAME: str
    QUESTION: str

    def run(self, options: Options) -> Report: ...


# -- machine ----------------------------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """The machine in words: processor, cores, memory and kernel."""
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


# -- results and page -------------------------------------------------------------------------------------------------


def save(case: Case, report: Report, options: Options) -> Path:
    """Write the results of `case` as JSON. A quick run's go elsewhere."""
    folder = ROOT / ".bench" / "quick" if options.quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.NAME}.json"
    content = {
        "name": case.NAME,
        "question": case.QUESTION,
        "machine": machine(),
        "versions": report.versions,
        "columns": report.columns,
        "rows": report.rows,
        "checks": [asdict(check) | {"met": check.met} for check in report.checks],
        "notes": report.notes,
    }
    if getattr(case, "KEEPS_RAW", False):  # a page is computed from the figures
        content["raw"] = report.raw
    path.write_text(as_text(content))
    if options.quick:
        path.with_suffix(".raw.json").write_text(json.dumps(report.raw))
    return path


def as_text(content: Json) -> str:
    """JSON of a result, with one line per row, check and note."""
    lines = []
    for key, value in content.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join("  " + json.dumps(each, ensure_ascii=False) for each in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def result_page(content: Json) -> str:
    """The page of one result."""
    checks = [_check(found) for found in content["checks"]]
    parts = [f"# {content['name']}", content["question"], table(content["columns"], content["rows"])]
    if checks:
        parts.append(table(["asked", "found", "wanted", "met"], [check.row() for check in checks]))
    parts += content["notes"]
    here = content["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    parts.append(
        f"<sub>{here['processor']}, {here['cores']} cores, {here['memory']}, Linux {here['kernel']}; {versions}. "
        "Medians, with the lowest and the highest figure.</sub>"
    )
    return "\n\n".join(parts) + "\n"


def _check(found: Json) -> Check:
    spread = tuple(found["spread"]) if found["spread"] else None
    return Check(**{key: value for key, value in found.items() if key not in ("met", "spread")}, spread=spread)


def pages(names: Sequence[str]) -> dict[Path, str]:
    """The generated files for all results: one page and at most one chart each, and the page of missed figures."""
    found: dict[Path, str] = {}
    missed, count = [], 0
    for name in names:
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        content = json.loads(path.read_text())
        found[PAGES / "results" / f"{name}.md"] = result_page(content)
        if (drawn := chart(content)) is not None:
            found[PAGES / "charts" / f"{name}.svg"] = drawn
        checks = [_check(check) for check in content["checks"]]
        count += len(checks)
        missed += [[*check.row()[:3], f"[{name}](results/{name}.md)"] for check in checks if not check.met]
    summary = f"{len(missed)} of {count} figures miss their target:\n\n"
    page = PAGES / "missed.md"
    shown = summary + table(["asked", "found", "wanted", "result"], missed)
    found[page] = between(page.read_text(), "missed", shown)
    return found


def write_pages(names: Sequence[str]) -> None:
    """Write the generated files of the benchmark pages."""
    for path, text in pages(names).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def between(text: str, name: str, content: str) -> str:
    """`text` with `content` between the markers of `name`. Raises `BenchmarkError` if they are not there."""
    begin, end = f"<!-- {name} begin -->", f"<!-- {name} end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise BenchmarkError(f"there are no markers {begin} and {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"
