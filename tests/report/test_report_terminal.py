"""A report as text."""

from __future__ import annotations

import re
from typing import Any

import pytest

from report_examples import NAME, measured, report
from stallfree.errors import InputError
from stallfree.report import render_report

MARKS = "█▓▒░"


def bars(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and set(line) <= set(MARKS)]


def test_everything_is_said_in_80_columns() -> None:
    text = render_report(report())
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    data = report()
    for said in (NAME, data["bottleneck"], *data["notes"], *(item["do"] for item in data["advice"])):
        assert " ".join(said.split()) in flat
    rows = {words[0]: line for line in text.splitlines() if (words := line.split()) and words[0] in "GPSCF"}
    assert re.search(r"1,234 +1,210 to 1,259 +7$", rows["G"])
    assert re.search(r"811 +795 to 827 +7$", rows["P"])
    assert re.search(r"312 +306 to 319 +3$", rows["S"])
    assert rows["C"].endswith(" not measured")
    assert "the samples are larger than the memory: no cache was made" in flat
    assert "cold (first epoch, cold files): 302 samples/s (296 to 308)" in text
    assert "compute 24%, copy 0.4%, prep stall 13%, fetch stall 62%" in text
    assert "1. Cache 62% of the samples (140 MB) (811 samples/s, 2.69 times)" in flat
    assert flat.index("2.69 times") < flat.index("2.67 times")


def test_the_first_lines_are_the_bottleneck_and_the_best_advice() -> None:
    data = report()
    first = " ".join(" ".join(render_report(data).splitlines()[:5]).split())
    assert first.startswith(data["bottleneck"])
    assert "1. Cache 62% of the samples (140 MB) (811 samples/s, 2.69 times)" in first


def test_bars_are_as_long_as_the_shares() -> None:
    data = report()
    for bar, run in zip(bars(render_report(data)), ("cold", "warm"), strict=True):
        assert len(bar) == 80
        assert list(bar) == sorted(bar, key=MARKS.index)
        for mark, share in zip(MARKS, data["shares"][run].values(), strict=True):
            assert bar.count(mark) == pytest.approx(share * 80, abs=1)


def test_the_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = render_report(report())
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    assert render_report(report()) == expected


def test_a_terminal_obeys_nothing_in_a_report() -> None:
    data = report()
    for where in (data["job"], data["rates"]["S"], data["runs"]["cold"], data["advice"][0]):
        key = next(key for key in ("dataset", "note", "do") if key in where)
        where[key] = "a\x1b[31mb\rc\x07 [bold]d[/bold] :smile:"
    data["bottleneck"] = data["notes"][0] = "\x1b]0;title\x07"
    text = render_report(data)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert text.count("[bold]d[/bold] :smile:") == 4


def nothing() -> dict[str, Any]:
    """A report of a job of which nothing could be measured."""
    data = report()
    for group in ("rates", "runs"):
        data[group] = {name: measured(None, f"no {name}") for name in data[group]}
    data.update(advice=[], notes=[], shares={"cold": None, "warm": None})
    data["curves"] = {"cache": None, "cpus": None, "storage": None}
    return data


def test_nothing_measured() -> None:
    text = render_report(nothing())
    assert text.count("not measured") == 7
    for name in ("G", "P", "S", "C", "F", "cold", "warm"):
        assert f"no {name}" in text
    assert "Notes" not in text
    assert "no change that was looked at" in text
    assert not bars(text)


def test_another_version() -> None:
    with pytest.raises(InputError, match="version 3"):
        render_report(report() | {"version": 3})
