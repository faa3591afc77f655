"""`stallfree replay`: the table, the JSON, and what is refused."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from stallfree.analysis.replay import replay as replay_here
from stallfree.cli.replay import replay
from stallfree.datasets.epoch_source import make_plan
from stallfree.errors import StallfreeError

app = typer.Typer()
app.command("replay")(replay)


MADE = ("--samples", "100")


def run(*arguments: str | Path | int) -> Result:
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": "80"})


def rows(output: str) -> list[list[str]]:
    """The rows of the table."""
    return [line.replace(" mean", "").split() for line in output.splitlines() if "%" in line and ": " in line[:9]]


def test_the_table_compares_policies(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("--capacity", "35%", "--samples", "2k", "--epochs", 3, "--policy", "minio,lru", "--batch-size", 16)
    done = run(*arguments, "--json", out)
    assert f"wrote {out}" in done.output.replace("\n", "")
    plans = [make_plan(2000, shuffle=True, seed=0, epoch=epoch) for epoch in range(3)]
    expected = [replay_here(plans, policy=name, capacity=700, batch_size=16) for name in ("minio", "lru")]
    written = json.loads(out.read_text())
    assert (written["format"], written["version"], written["batch_size"]) == ("stallfree-replay", 1, 16)
    for found, outcome in zip(written["policies"], expected, strict=True):
        assert (found["policy"], found["capacity_items"]) == (outcome.policy, 700)
        assert [epoch["hits"] for epoch in found["epochs"]] == [epoch.hits for epoch in outcome.epochs]
        assert found["total"]["storage_operations"] == outcome.total.misses
        assert found["total"]["evictions"] == outcome.total.evictions
    table = rows(done.output)
    assert table[:3] == [
        ["minio:", "1", "0", "2,000", "0.00%", "0", "1,300"],
        ["minio:", "2-3", "700", "1,300", "35.00%", "0", "1,300"],
        ["minio:", "all", "1,400", "4,600", "23.33%", "0", "3,900"],
    ]
    later = expected[1].epochs[1:]
    shown = [int(table[4][column].replace(",", "")) for column in (2, 5)]
    assert shown == pytest.approx([sum(e.hits for e in later) / 2, sum(e.evictions for e in later) / 2], abs=1)
    first, second, *_ = done.output.splitlines()
    more = expected[1].total.misses / 4600 - 1
    assert first == f"minio reads 4,600 of 6,000 samples from storage; lru {more:.0%} more"
    assert "hits 35.00% from the second epoch on (700 samples)" in second


def test_every_epoch_on_demand_and_the_oracle_is_compared_and_not_recommended() -> None:
    policies = ("--policy", "oracle,minio,lru", "--per-epoch")
    output = run(*MADE, "--capacity", 50, "--epochs", 3, "--batch-size", 10, *policies).output
    assert [row[-6:-4] for row in rows(output) if row[0] == "minio:"][1:3] == [["2", "50"], ["3", "50"]]
    assert output.startswith("minio reads ")
    assert "(it knows the future)" in output.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*MADE, "--capacity", "4GiB"), "--capacity='4GiB' is no number of samples"),
        ((*MADE, "--capacity", "101"), "--capacity='101' is more than all 100 samples"),
        ((*MADE, "--capacity", "1", "--policy", "importance"), "--policy importance needs"),
        (("--capacity", "1%", "--samples", "900000M"), "are free: give fewer --samples or --epochs"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(StallfreeError, match=message):
        run(*arguments)
