"""`stallfree top`."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import stallfree as sf
from children import Child
from stallfree.cache import SampleCache
from stallfree.cli.top import top
from stallfree.errors import InputError

app = typer.Typer()
app.command()(top)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "140"})


def make_cache() -> SampleCache:
    return SampleCache(100, capacity="4MiB", fingerprint="test", name="pictures")


def test_nothing_to_show(store_root: Path) -> None:
    for arguments in ([], ["--once"]):
        done = run(*arguments)
        assert (done.output, done.exit_code) == (f"no caches and no loaders in {store_root}\n", 0)
    assert json.loads(run("--json").output) == {
        "format": "stallfree-top",
        "version": 1,
        "caches": [],
        "loaders": [],
        "servers": [],
    }


def test_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    loader = sf.DataLoader(list(torch.arange(20)), 4, num_workers=1)
    with closing(make_cache()) as cache:
        cache.put_many([1], [b"one"])
        cache.get_many([1, 1, 1, 2])
        iterator = iter(loader)
        next(iterator)
        done = run("--once")
        del iterator
    assert done.exit_code == 0
    cache_row = next(line for line in done.output.splitlines() if "pictures" in line)
    assert "minio" in cache_row
    assert "1 / 100" in cache_row
    assert " of 4.0 MiB" in cache_row
    assert "75.0%" in cache_row
    loader_row = next(line for line in done.output.splitlines() if "train.py" in line)
    assert loader_row.split()[:4] == [str(os.getpid()), "train.py", "list", "0"]
    assert loader_row.split()[4] in ("0", "4")  # samples, at the last update: there is one per second
    assert loader_row.split()[-1] == "1"


def test_json() -> None:
    with closing(make_cache()) as cache:
        cache.get_many([1])
        found: Any = json.loads(run("--once", "--json").output)
    assert [(row["name"], row["hits"], row["misses"], row["hit_ratio"]) for row in found["caches"]] == [
        ("pictures", 0, 1, 0.0)
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--interval", "1"], "has no unit"),
        (["--interval", "soon"], "is no time"),
        (["--interval", "0s"], "must be above 0"),
    ],
)
def test_bad_input(arguments: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(*arguments)


def test_without_a_terminal_there_is_nothing_live() -> None:
    with closing(make_cache()), pytest.raises(InputError, match="no terminal: give --once"):
        run()


def live(terminal: int) -> None:
    """The command in a terminal, in a process of its own."""
    for place in (0, 1, 2):
        os.dup2(terminal, place)
    os.environ.update(COLUMNS="140", LINES="40", TERM="xterm")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(1, "w", closefd=False) as sys.stdout:
        top(interval="50ms")


def rest(terminal: int) -> str:
    """What is still written to a terminal until nobody has it open."""
    shown = b""
    with contextlib.suppress(OSError):  # which is how a terminal says that
        while more := os.read(terminal, 4096):
            shown += more
    return shown.decode(errors="replace")


def test_live_in_a_terminal() -> None:
    """It shows what changes, and ends with Ctrl-C."""
    ours, theirs = pty.openpty()
    with closing(make_cache()) as cache:
        process = Child(live, theirs)
        os.close(theirs)
        shown = ""
        put = False
        try:
            while "2 / 100" not in shown:
                shown += os.read(ours, 4096).decode(errors="replace")
                if "0 / 100" in shown and not put:
                    put = True
                    cache.put_many([1, 2], [b"one", b"two"])
        finally:
            process.signal(signal.SIGINT)
            shown += rest(ours)
            code = process.wait()
            os.close(ours)
    assert code == 0
    assert "Traceback" not in shown
