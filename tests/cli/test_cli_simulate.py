"""`stallfree simulate`."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from stallfree.analysis.simulate import Pipeline
from stallfree.cli.simulate import simulate
from stallfree.errors import InputError

ARTICLE = ("--loaders", "3", "--load", "80ms", "--transfer", "15ms", "--compute", "30ms")


app = typer.Typer()
app.command("simulate")(simulate)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "80", "TERM": "dumb"})


def test_json_and_a_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "run.json"
    page = tmp_path / "page.html"
    output = run(*ARTICLE, "--seeds", "3", "--seconds", "0.5", "--json", str(path), "--html", str(page)).output
    assert output.splitlines()[1] == "Prefetch gains 50%: copy and step overlap."
    assert f"wrote {path}" in output
    assert "3 loaders, 80 ms to load a batch, 15 ms to copy it, 30 ms to compute" in page.read_text()
    assert 'id="data">{"format": "stallfree-simulation"' in page.read_text()
    data = json.loads(path.read_text())
    assert (data["format"], data["version"], data["shown"]) == ("stallfree-simulation", 1, 0)
    assert data["pipeline"] == asdict(Pipeline(3, 0.080, 0.015, 0.030))
    assert (data["comparison"]["seeds"], data["comparison"]["seconds"]) == (3, 0.5)
    assert [one["name"] for one in data["runs"]] == ["without prefetch", "with prefetch"]
    for place, one in enumerate(data["runs"]):
        assert (one["seconds"], one["queue"], one["depth"]) == (0.5, 6, place)
        ends = [end for _, end, actor, *_ in one["events"] if actor == "device"]
        least, most = data["comparison"]["singles"][place]
        assert least <= sum(end < 0.5 for end in ends) <= most, "the run that is shown is that of a seed"
    run(*ARTICLE, "--prefetch", "--seeds", "1", "--variation", "0", "--json", str(path))
    data = json.loads(path.read_text())
    assert (data["shown"], data["comparison"]["singles"]) == (1, [[20, 20], [30, 30]])


LOG = [
    {"start": 10.0, "end": 10.4, "actor": "loader 0", "what": "fetch", "batch": 0, "epoch": 1},
    {"start": 10.4, "end": 10.6, "actor": "loader 0", "what": "prep", "batch": 0, "epoch": 1},
    {"start": 10.6, "end": 11.0, "actor": "device", "what": "compute", "batch": 0, "epoch": 1},
    {"start": 10.5, "end": 11.1, "actor": "loader 0", "what": "fetch", "batch": 1, "epoch": 1},
]


def test_a_log(tmp_path: Path) -> None:
    log, data, page = tmp_path / "run[1].jsonl", tmp_path / "run.json", tmp_path / "page.html"
    log.write_text("".join(f"{json.dumps(event)}\n" for event in LOG))
    output = run("--events", str(log), "--json", str(data), "--html", str(page)).output
    assert "stallfree recording" in page.read_text()
    assert "run[1].jsonl: 1.1 s" in output
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for line in ("loader 0: fetch 2 500 ms 91%", "loader 0: prep 1 200 ms 18%", "device: compute 1 400 ms 36%"):
        assert line in lines
    written = json.loads(data.read_text())
    assert written["comparison"] is written["pipeline"] is None
    assert [len(one["events"]) for one in written["runs"]] == [4]


ONE = '{"start": 1, "end": 1, "actor": "device", "what": "compute", "batch": 0}\n'


@pytest.mark.parametrize(
    ("arguments", "message", "log"),
    [
        (ARTICLE[:4], "given: --loaders, --load. Give all of --loaders 8 --load", ""),
        ((*ARTICLE, "--load", "80"), "--load='80' has no unit", ""),
        ((*ARTICLE, "--loaders", "0"), "loaders=0: give a whole number, 1 or more", ""),
        ((*ARTICLE, "--events", "log"), "given: --loaders, --load, --transfer, --compute. Give", ""),
        (("--events", "/nowhere/log"), "/nowhere/log cannot be read", ""),
        (("--events", "log"), "there are no events", ""),
        (("--events", "log"), r"cannot be read as a log .*\(after 1 events\)", ONE + "no json\n"),
        (("--events", "log"), "at one instant", ONE),
        (("--events", "log", "--seconds", "nan"), "seconds=nan: give a number above 0", ONE),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...], message: str, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").write_text(log)
    with pytest.raises(InputError, match=message):
        run(*arguments)
