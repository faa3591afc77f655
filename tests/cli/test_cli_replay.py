"""`stallfree replay`: traces in every form, the table, the JSON, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from stallfree.analysis import replay as replay_here
from stallfree.cli.replay import replay
from stallfree.errors import StallfreeError
from stallfree.sampling.plans import make_plan

app = typer.Typer()
app.command("replay")(replay)


def run(*arguments: str | Path | int, columns: int = 100) -> Result:
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": str(columns)})


def rows(output: str) -> list[list[str]]:
    """The rows of the table, a policy in front of each."""
    found: list[list[str]] = []
    for line in output.splitlines():
        words = line.replace(" mean", "-mean").split()
        if "%" in line and words[0] in ("minio", "lru", "lfu", "random", "oracle", "importance"):
            found.append(words)
        elif "%" in line and found and "Each epoch" not in line:
            found.append([found[-1][0], *words])
    return found


def test_the_table_compares_policies() -> None:
    done = run("--capacity", "35%", "--samples", "2k", "--epochs", 3, "--policy", "minio,lru", "--seed", 5)
    epochs = [make_plan(2000, shuffle=True, seed=5, epoch=epoch) for epoch in range(3)]
    lru = replay_here(epochs, policy="lru", capacity=700).epochs
    later = [lru[1].hits + lru[2].hits, lru[1].evictions + lru[2].evictions]
    table = rows(done.output)
    assert table[:3] == [
        ["minio", "1", "0", "2,000", "0.00%", "0", "1,300"],
        ["minio", "2-3-mean", "700", "1,300", "35.00%", "0", "1,300"],
        ["minio", "all", "1,400", "4,600", "23.33%", "0", "3,900"],
    ]
    assert [row[:2] for row in table[3:]] == [["lru", "1"], ["lru", "2-3-mean"], ["lru", "all"]]
    assert [int(table[4][2].replace(",", "")), int(table[4][5].replace(",", ""))] == pytest.approx(
        [later[0] / 2, later[1] / 2], abs=1
    )
    assert "no policy hits more than the 700 samples (35.00%)" in done.output
    assert "Each miss is one storage operation" in done.output


def test_every_epoch_on_demand() -> None:
    arguments = ("--capacity", "50%", "--samples", "100", "--epochs", 3, "--policy", "minio", "--per-epoch")
    assert [row[:3] for row in rows(run(*arguments).output)] == [
        ["minio", "1", "0"],
        ["minio", "2", "50"],
        ["minio", "3", "50"],
        ["minio", "all", "100"],
    ]


@pytest.mark.parametrize("sampler", ["sequential", "zipf"])
def test_other_orders(sampler: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run("--capacity", "20%", "--samples", 500, "--epochs", 2, "--sampler", sampler, "--policy", "lru", "--json", out)
    second = json.loads(out.read_text())["policies"][0]["epochs"][1]
    assert second["accesses"] == 500
    if sampler == "sequential":
        assert second["hits"] == 0  # the textbook's worst case: each goes just before it is asked for again
    else:
        assert second["hits"] > 0.5 * 500  # the most popular fifth is asked for more often than the rest


EPOCHS = [[3, 1, 2, 0], [0, 3, 3, 1], [2, 2, 0, 3]]
FORMS = {
    "rows.npy": np.array(EPOCHS, np.int32),
    "lines.jsonl": "\n".join(map(json.dumps, EPOCHS)) + "\n\n",
    "ids.txt": "\n\n\n".join("\n".join(map(str, epoch)) for epoch in EPOCHS),
}


def write(path: Path, content: Any) -> Path:
    if isinstance(content, str):
        path.write_text(content)
    else:
        np.save(path, content)
    return path


@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_recorded_trace_in_any_form(form: str, tmp_path: Path) -> None:
    trace, out = write(tmp_path / form, FORMS[form]), tmp_path / "out.json"
    done = run("--trace", trace, "--capacity", 2, "--policy", "oracle,lfu", "--batch-size", 1, "--json", out)
    assert f"wrote {out}" in done.output.replace("\n", "")
    assert "Each epoch asks" not in done.output
    written = json.loads(out.read_text())
    assert (written["format"], written["version"], written["batch_size"]) == ("stallfree-replay", 1, 1)
    for found, policy in zip(written["policies"], ("oracle", "lfu"), strict=True):
        expected = replay_here(EPOCHS, policy=policy, capacity=2, batch_size=1)
        assert (found["policy"], found["capacity_items"]) == (policy, 2)
        assert [epoch["hits"] for epoch in found["epochs"]] == [epoch.hits for epoch in expected.epochs]
        assert found["total"]["storage_operations"] == expected.total.misses
        assert found["total"]["evictions"] == expected.total.evictions


def test_one_row_of_ids_is_one_epoch(tmp_path: Path) -> None:
    trace = write(tmp_path / "flat.npy", np.array([4, 4, 2]))
    assert rows(run("--trace", trace, "--capacity", 1, "--policy", "lru", "--batch-size", 1).output) == [
        ["lru", "1", "1", "2", "33.33%", "1", "0"]
    ]


def test_sizes_give_bytes(tmp_path: Path) -> None:
    sizes = write(tmp_path / "sizes.npy", np.full(300, 100_000))
    out = tmp_path / "out.json"
    arguments = ("--samples", 300, "--epochs", 2, "--sizes", sizes, "--capacity", "16MiB", "--policy", "minio")
    done = run(*arguments, "--json", out, columns=80)
    assert "28.6 MiB" in done.output
    assert "…" not in done.output  # all of it fits on a usual terminal
    second = json.loads(out.read_text())["policies"][0]["epochs"][1]
    assert second["storage_bytes"] == 100_000 * second["misses"] == 100_000 * (300 - second["hits"])
    assert 140 < second["hits"] < 168


def test_importance_takes_scores(tmp_path: Path) -> None:
    scores = write(tmp_path / "scores.npy", np.arange(100.0))
    arguments = ("--samples", 100, "--epochs", 3, "--scores", scores, "--capacity", 30, "--policy", "importance,minio")
    table = rows(run(*arguments).output)
    assert [row[:3] for row in table if row[1] == "2-3-mean"] == [
        ["importance", "2-3-mean", "30"],
        ["minio", "2-3-mean", "30"],
    ]


MADE = ("--samples", "100")
BAD: list[tuple[tuple[str, ...], str]] = [
    (("--capacity", "1"), "there is no trace: give --samples"),
    ((*MADE, "--capacity", "150%"), "capacity='150%': a share is more than 0% and at most 100%"),
    ((*MADE, "--capacity", "0"), "--capacity='0' is no number of samples"),
    ((*MADE, "--capacity", "4GiB"), "--capacity='4GiB' is no number of samples"),
    ((*MADE, "--capacity", "101"), "--capacity='101' is more than all 100 samples"),
    ((*MADE, "--capacity", "1", "--policy", "lru,best"), "policy='best' is unknown: use one of fifo, importance"),
    ((*MADE, "--capacity", "1", "--policy", "importance"), "--policy importance needs"),
    (
        (*MADE, "--capacity", "1", "--scores", "x.npy"),
        "--scores is for --policy importance, not for minio, lru, oracle",
    ),
    ((*MADE, "--capacity", "1", "--sampler", "dice"), "--sampler='dice' is unknown: use shuffle, sequential or zipf"),
    ((*MADE, "--capacity", "1", "--json", "{here}/no/out.json"), "there is no folder {here}/no"),
    ((*MADE, "--capacity", "1", "--sizes", "{here}/none.npy"), "--sizes {here}/none.npy cannot be read"),
    ((*MADE, "--capacity", "1", "--sizes", "{here}/text.npy"), "--sizes {here}/text.npy cannot be read"),
    ((*MADE, "--capacity", "1", "--trace", "{here}/ids.txt"), "--trace is taken as it is: leave out --samples"),
    (("--capacity", "1", "--samples", "-5"), "--samples='-5' is no number of samples"),
    (("--capacity", "1%", "--samples", "900000M"), "are free: give fewer --samples or --epochs"),
    (("--capacity", "1", "--trace", "{here}/none.txt"), "--trace {here}/none.txt cannot be read: No such file"),
    (("--capacity", "1", "--trace", "{here}"), "--trace {here} cannot be read: Is a directory"),
    (("--capacity", "1", "--trace", "{here}/binary.txt"), "--trace {here}/binary.txt cannot be read"),
    (("--capacity", "1", "--trace", "{here}/empty.txt"), "--trace {here}/empty.txt holds no ids"),
    (("--capacity", "1", "--trace", "{here}/words.txt"), "words.txt, line 4 holds 'two': ids are integers"),
    (("--capacity", "1", "--trace", "{here}/below.txt"), "below.txt, line 2 holds '-1': ids are integers"),
    (("--capacity", "1", "--trace", "{here}/broken.jsonl"), "broken.jsonl, line 2 holds '[2, 1.5]': ids are integers"),
    (("--capacity", "1", "--trace", "{here}/floats.npy"), "must hold ids, integers of 0 or more; it holds float64"),
    (("--capacity", "1", "--trace", "{here}/below.npy"), "must hold ids, integers of 0 or more; it holds the id -2"),
    (("--capacity", "1", "--trace", "{here}/cube.npy"), "it holds 3 dimensions of int64"),
]
FILES: dict[str, Any] = {
    "ids.txt": "1\n",
    "text.npy": "1\n",
    "empty.txt": "\n\n",
    "words.txt": "1\n\n2\ntwo\n",
    "below.txt": "1\n-1\n",
    "broken.jsonl": "[1, 2]\n[2, 1.5]\n",
    "floats.npy": np.ones(100),
    "below.npy": np.array([1, -2]),
    "cube.npy": np.zeros((2, 2, 2), np.int64),
}


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    for name, content in FILES.items():
        write(tmp_path / name, content)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StallfreeError) as caught:
        run(*(argument.format(here=tmp_path) for argument in arguments))
    assert message.format(here=tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [(), (*MADE, "--capacity", "1", "--batch-size", "0"), ("--epochs", "0")])
def test_wrong_options(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2
