"""The benchmarks: their harness, their results, and the pages that show them."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import harness
from benchmarks.harness import Case, Condition, Contender, Figure, Options, run_case
from benchmarks.run import NAMES, find_case

RESULTS = sorted(harness.RESULTS.glob("*.json"))


def rate(fast: float, factor: float, round: int) -> dict[str, Any]:
    """A contender for the harness; its second run is ten times as fast."""
    return {"rate": [fast * factor * 10**round] * 3, "seconds": 1 / fast}


def test_figures_are_medians_of_rounds_and_ratios_are_taken_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = [
        Contender("slow", "slow", "test_docs_benchmarks:rate", {"fast": 2}),
        Contender("stallfree", "ours", "test_docs_benchmarks:rate", {"fast": 6}),
        Contender("peer", "a peer", "nowhere:rate", venv="no such environment"),
    ]
    figures = {"rate": Figure("samples/s"), "seconds": Figure("s", ".2f", less=True)}
    case = Case("How fast?", "In memory.", contenders, figures, [Condition("1", "once", {"factor": 1})], rounds=2)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    result = run_case("made_up", case, Options())
    assert [title for title, _ in result["columns"]][-1] == "stallfree: times as fast as this"
    assert result["rows"][:2] == [
        ["once", "slow", [11, 2, 20], [0.5, 0.5, 0.5], [3, 3, 3]],
        ["once", "ours", [33, 6, 60], [0.16667, 0.16667, 0.16667], ""],
    ]
    assert "not installed" in result["rows"][2][2]
    broken = Case("?", "", [Contender("stallfree", "", "nowhere:rate")], figures)
    with pytest.raises(harness.BenchmarkError, match="No module named 'nowhere'"):
        run_case("made_up", broken, Options())


@pytest.mark.parametrize("name", NAMES)
def test_the_contenders_of_a_case_exist_and_are_told_apart(name: str) -> None:
    case = find_case(name)
    keys = [each.key for each in case.contenders]
    assert len(set(keys)) == len(keys)
    assert not case.ours or case.ours in keys or len(keys) == 1
    for entry in case.contenders:
        module, function = entry.run.split(":")
        if not module.startswith("benchmarks.peers."):
            assert callable(getattr(importlib.import_module(module), function))
        assert f"def {function}(" in (harness.ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert set(entry.only) <= {each.key for each in case.conditions}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_has_medians_with_their_spread_versions_and_machine(path: Path) -> None:
    result = json.loads(path.read_text())
    assert path.stem in NAMES
    assert {"question", "setup", "date", "machine", "versions", "notes"} < set(result)
    assert {"processor", "cores", "memory", "kernel"} <= set(result["machine"])
    assert harness.as_text(result) == path.read_text()
    for row in result["rows"]:
        assert len(row) == len(result["columns"])
        for cell in row:
            assert isinstance(cell, str) or (len(cell) == 3 and cell[1] <= cell[0] <= cell[2]), row
