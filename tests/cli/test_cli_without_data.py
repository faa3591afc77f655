"""`stallfree replay` and `stallfree simulate`: the tables, the JSON, the pages, and what is refused."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stallfree.analysis.replay import replay
from stallfree.analysis.simulate import Pipeline
from stallfree.cli import app
from stallfree.datasets.epoch_source import make_plan
from stallfree.errors import StallfreeError


def run(*words: object) -> str:
    env = {"COLUMNS": "80", "TERM": "dumb"}
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False, env=env).output


MADE = ("replay", "--samples", "100")


def rows(output: str) -> list[list[str]]:
    """The rows of the table of policies."""
    return [line.replace(" mean", "").split() for line in output.splitlines() if "%" in line and ": " in line[:9]]


def test_the_table_compares_policies(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--capacity", "35%", "--samples", "2k", "--epochs", 3, "--policy", "minio,lru", "--batch-size", 16)
    output = run("replay", *options, "--json", out)
    plans = [make_plan(2000, shuffle=True, seed=0, epoch=epoch) for epoch in range(3)]
    expected = [replay(plans, policy=name, capacity=700, batch_size=16) for name in ("minio", "lru")]
    written = json.loads(out.read_text())
    assert (written["format"], written["version"], written["batch_size"]) == ("stallfree-replay", 1, 16)
    for found, outcome in zip(written["policies"], expected, strict=True):
        assert (found["policy"], found["capacity_items"]) == (outcome.policy, 700)
        assert [epoch["hits"] for epoch in found["epochs"]] == [epoch.hits for epoch in outcome.epochs]
        assert found["total"]["storage_operations"] == outcome.total.misses
        assert found["total"]["evictions"] == outcome.total.evictions
    assert rows(output)[:3] == [
        ["minio:", "1", "0", "2,000", "0.00%", "0", "1,300"], ["minio:", "2-3", "700", "1,300", "35.00%", "0", "1,300"],
        ["minio:", "all", "1,400", "4,600", "23.33%", "0", "3,900"],
    ]  # fmt: skip
    later = expected[1].epochs[1:]
    shown = [int(rows(output)[4][column].replace(",", "")) for column in (2, 5)]
    assert shown == pytest.approx([sum(e.hits for e in later) / 2, sum(e.evictions for e in later) / 2], abs=1)
    more = expected[1].total.misses / 4600 - 1
    assert output.startswith(f"minio reads 4,600 of 6,000 samples from storage; lru {more:.0%} more\n")


def test_every_epoch_on_demand_and_the_oracle_is_compared_and_not_recommended() -> None:
    policies = ("--policy", "oracle,minio,lru", "--per-epoch")
    output = run(*MADE, "--capacity", 50, "--epochs", 3, "--batch-size", 10, *policies)
    assert [row[-6:-4] for row in rows(output) if row[0] == "minio:"][1:3] == [["2", "50"], ["3", "50"]]
    assert output.startswith("minio reads ")
    assert "(it knows the future)" in output.splitlines()[0]


ARTICLE = ("simulate", "--loaders", 3, "--load", "80ms", "--transfer", "15ms", "--compute", "30ms")


def test_json_and_a_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path, page = tmp_path / "run.json", tmp_path / "page.html"
    output = run(*ARTICLE, "--seeds", 3, "--seconds", 0.5, "--json", path, "--html", page)
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
    run(*ARTICLE, "--prefetch", "--seeds", 1, "--variation", 0, "--json", path)
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
    output = run("simulate", "--events", log, "--json", data, "--html", page)
    assert "stallfree recording" in page.read_text()
    assert "run[1].jsonl: 1.1 s" in output
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for line in ("loader 0: fetch 2 500 ms 91%", "loader 0: prep 1 200 ms 18%", "device: compute 1 400 ms 36%"):
        assert line in lines
    written = json.loads(data.read_text())
    assert written["comparison"] is written["pipeline"] is None
    assert [len(one["events"]) for one in written["runs"]] == [4]


ONE = '{"start": 1, "end": 1, "actor": "device", "what": "compute", "batch": 0}\n'


@pytest.mark.parametrize(("arguments", "message", "log"), [
    ((*MADE, "--capacity", "4GiB"), "--capacity='4GiB' is no number of samples", ""),
    ((*MADE, "--capacity", "101"), "--capacity='101' is more than all 100 samples", ""),
    ((*MADE, "--capacity", "1", "--policy", "importance"), "--policy importance needs", ""),
    (("replay", "--capacity", "1%", "--samples", "900000M"), "are free: give fewer --samples or --epochs", ""),
    (ARTICLE[:5], "given: --loaders, --load. Give all of --loaders 8 --load", ""),
    ((*ARTICLE, "--load", "80"), "--load='80' has no unit", ""),
    ((*ARTICLE, "--loaders", 0), "loaders=0: give a whole number, 1 or more", ""),
    ((*ARTICLE, "--events", "log"), "given: --loaders, --load, --transfer, --compute. Give", ""),
    (("simulate", "--events", "/nowhere/log"), "/nowhere/log cannot be read", ""),
    (("simulate", "--events", "log"), "there are no events", ""),
    (("simulate", "--events", "log"), r"cannot be read as a log.*\(after 1 events\)", ONE + "no json\n"),
    (("simulate", "--events", "log"), "at one instant", ONE),
    (("simulate", "--events", "log", "--seconds", "nan"), "seconds=nan: give a number above 0", ONE),
])  # fmt: skip
def test_bad_input(
    arguments: tuple[object, ...], message: str, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").write_text(log)
    with pytest.raises(StallfreeError, match=message):
        run(*arguments)
