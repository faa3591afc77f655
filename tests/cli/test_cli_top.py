"""`stallfree top`."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import stallfree as sf
from stallfree.cache import SampleCache
from stallfree.cli.top import tables, top
from stallfree.errors import InputError
from stallfree.observe.jobs import Jobs

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
    assert json.loads(run("--once", "--json").output) == {
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
        cache.put(1, b"one")
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
        (["--json"], "give --once too"),
    ],
)
def test_bad_input(arguments: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(*arguments)


def test_without_a_terminal_there_is_nothing_live() -> None:
    with closing(make_cache()), pytest.raises(InputError, match="no terminal: give --once"):
        run()


def test_a_cache_that_cannot_be_read_is_shown(store_root: Path) -> None:
    from rich.console import Console

    with closing(make_cache()):
        meta = store_root / "pictures" / "meta.json"
        whole = meta.read_bytes()
        meta.write_text("no json")
        console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(tables(Jobs().look()))
        console.file.close()
        meta.write_bytes(whole)
    row = next(line for line in console.export_text().splitlines() if "pictures" in line)
    assert row.split()[1:4] == ["?", "?", "?"]


LIVE = "import typer; from stallfree.cli.top import top; typer.run(top)"


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
    environment = {**os.environ, "COLUMNS": "140", "LINES": "40", "TERM": "xterm"}
    with closing(make_cache()) as cache:
        process = subprocess.Popen(
            [sys.executable, "-c", LIVE, "--interval", "50ms"],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
        )  # fmt: skip
        os.close(theirs)
        shown = ""
        put = False
        try:
            while "2 / 100" not in shown:
                shown += os.read(ours, 4096).decode(errors="replace")
                if "0 / 100" in shown and not put:
                    put = True
                    cache.put_many([1, 2], [b"one", b"two"])
            process.send_signal(signal.SIGINT)
            shown += rest(ours)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)
    assert "Traceback" not in shown
