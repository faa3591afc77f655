"""`stallfree simulate`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from stallfree.analysis.simulate import Pipeline, compare
from stallfree.cli.simulate import simulate
from stallfree.errors import InputError, text_of
from stallfree.events import Event, write_events

ARTICLE = ("--loaders", "3", "--load", "80ms", "--transfer", "15ms", "--compute", "30ms")


app = typer.Typer()
app.command("simulate")(simulate)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "80", "TERM": "dumb"})


def row(output: str, start: str) -> list[float]:
    """The numbers in the line that starts so."""
    line = next(line for line in output.splitlines() if line.strip().startswith(start))
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line.strip().removeprefix(start))]


def test_the_article() -> None:
    """The figures are those of `compare`, and the table says what they are worth."""
    output = run(*ARTICLE, "--seeds", "3").output
    expected = compare(Pipeline(3, 0.080, 0.015, 0.030), seeds=3)
    for start, name in (("first 1 s: mean of 3 seeds", "first"), ("steady state, per second", "steady")):
        shown = row(output, start)
        assert shown == pytest.approx([value for one in expected[name] for value in one.values()], rel=0.01)
    assert set(row(output, "first 1 s: single seeds")) == {count for pair in expected["singles"] for count in pair}
    assert row(output, "law, per second") == pytest.approx(expected["law"], rel=0.003)
    assert "min(W/l, 1/(t+m)) without, min(W/l, 1/max(t,m)) with prefetch" in output
    assert "One run is one draw" in output
    assert output.splitlines()[1] == "Prefetch gains 50%: copy and step overlap."
    assert max(map(len, [line for line in output.splitlines() if "seeds" in line and "draw" not in line])) <= 80


def test_json_and_a_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "run.json"
    page = tmp_path / "page.html"
    output = run(*ARTICLE, "--seeds", "3", "--seconds", "0.5", "--json", str(path), "--html", str(page)).output
    assert f"wrote {path}" in output
    assert "3 loaders, 80 ms to load a batch, 15 ms to copy it, 30 ms to compute" in page.read_text()
    assert 'id="data">{"format":"stallfree-simulation"' in page.read_text()
    data = json.loads(path.read_text())
    assert (data["format"], data["version"], data["shown"]) == ("stallfree-simulation", 1, 0)
    assert data["pipeline"] == asdict(Pipeline(3, 0.080, 0.015, 0.030))
    assert (data["comparison"]["seeds"], data["comparison"]["seconds"]) == (3, 0.5)
    assert [one["name"] for one in data["runs"]] == ["without prefetch", "with prefetch"]
    for place, one in enumerate(data["runs"]):
        assert (one["seconds"], one["queue"], one["depth"]) == (0.5, 6, place)
        steps = [end for _, end, actor, *_ in one["events"] if actor == "device"]
        least, most = data["comparison"]["singles"][place]
        assert least <= sum(end < 0.5 for end in steps) <= most, "the run that is shown is that of a seed"
        assert any(end > 0.5 for _, end, *_ in one["events"]), "what is under way at the end is there too"


def test_prefetch_chooses_the_run_that_is_shown_first(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run(*ARTICLE, "--prefetch", "--seeds", "1", "--variation", "0", "--json", str(path))
    assert json.loads(path.read_text())["shown"] == 1
    assert json.loads(path.read_text())["comparison"]["singles"] == [[20, 20], [30, 30]]


LOG = [
    Event(10.0, 10.4, "loader 0", "fetch", 0, 1),
    Event(10.4, 10.6, "loader 0", "prep", 0, 1),
    Event(10.6, 11.0, "device", "compute", 0, 1),
    Event(10.5, 11.1, "loader 0", "fetch", 1, 1),
]


def test_a_log(tmp_path: Path) -> None:
    log, data = tmp_path / "run[1].jsonl", tmp_path / "run.json"
    write_events(log, LOG)
    page = tmp_path / "page.html"
    output = run("--events", str(log), "--json", str(data), "--html", str(page)).output
    assert "stallfree recording" in re.sub(r"\s+", " ", page.read_text())
    assert "run[1].jsonl: 1.1 s" in output
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for line in ("loader 0: fetch 2 500 ms 91%", "loader 0: prep 1 200 ms 18%", "device: compute 1 400 ms 36%"):
        assert line in lines
    written = json.loads(data.read_text())
    assert written["comparison"] is written["pipeline"] is None
    assert [len(one["events"]) for one in written["runs"]] == [4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--loaders, --load, --transfer, --compute missing: give, for instance, --loaders 8"),
        (ARTICLE[:4], "--transfer, --compute missing"),
        ((*ARTICLE, "--load", "80"), "--load='80' has no unit"),
        ((*ARTICLE, "--loaders", "0"), "loaders=0: give a whole number, 1 or more"),
        ((*ARTICLE, "--events", "run.jsonl"), "leave out --loaders, --load, --transfer, --compute, or --events"),
        (("--events", "/nowhere/run.jsonl"), "/nowhere/run.jsonl cannot be read"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        run(*arguments)
    assert message in str(caught.value)
    assert "\n" not in text_of(caught.value)


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("no json\n", (), "line 1, is no event"),
        ('{"start": 1, "end": 1, "actor": "device", "what": "compute", "batch": 0}', (), "at one instant"),
        ('{"start": 1, "end": 2, "actor": "device", "what": "compute", "batch": 0}', ("--seconds", "nan"), "above 0"),
    ],
)
def test_bad_logs(tmp_path: Path, text: str, more: tuple[str, ...], message: str) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text(text)
    with pytest.raises(InputError, match=message):
        run("--events", str(log), *more)
