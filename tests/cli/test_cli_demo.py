"""`stallfree demo` from end to end, on few pictures and fast storage."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stallfree.cli._demo_data import make_pictures
from stallfree.cli._demo_rates import Rates
from warm import Interpreter

ARGUMENTS = ("demo", "--bandwidth", "1GB/s", "--batch-size", "16")

QUICK = """
import os
os.environ["COLUMNS"] = "120"
from stallfree.cli import _demo_rates, main
for measure in _demo_rates.prep_rate, _demo_rates.compute_rate:
    measure.__defaults__ = (0.1,)  # seconds
main()
"""


def rows(output: str, title: str) -> list[list[str]]:
    """The rows of the table below `title`, one list of cells each, without the loader's name."""
    lines = output.split(title)[1].split("\n\n")[0].splitlines()
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines if re.search(r"\d", line)]
    return [row[1:] if row[0] in ("torch", "stallfree") else row for row in cells]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder with a short path: torch's workers make sockets in it, whose paths have 107 bytes at most."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def check_demo(out: str) -> None:
    """Of 64 pictures and two epochs."""
    for word in ("making pictures", "torch, epoch 2", "stallfree, epoch 2", "What happened", "min(F, P, G)"):
        assert word in out

    happened = rows(out, "What happened")
    assert [row[0] for row in happened] == ["1", "2", "1", "2"]
    assert [row[-1] for row in happened[:2]] == ["0%", "0%"], "torch's loader has no cache"
    assert happened[3][-1] == "100%", "everything fits, so the second epoch hits"
    assert happened[3][3] == "0 MB"
    assert happened[0][3] == happened[1][3] == "6 MB"
    assert len(rows(out, "in samples/s")) == 4


def test_demo_makes_its_own_pictures(store_root: Path, interpreter: Interpreter) -> None:
    done = interpreter.run(QUICK, *ARGUMENTS, "--pictures", "64", "--epochs", "2")
    assert done.code == 0, done.err
    check_demo(done.out)
    assert not [name for name in done.files if name.startswith("stallfree")], "the pictures are removed"
    assert not list(store_root.iterdir())


@pytest.mark.slow
def test_demo_as_users_start_it(temporary: Path, store_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stallfree", *ARGUMENTS, "--pictures", "64", "--epochs", "2"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"COLUMNS": "120", "TMPDIR": str(temporary)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check_demo(done.stdout)
    assert not list(temporary.glob("stallfree*")), "the pictures are removed"
    assert not list(store_root.iterdir())


def test_demo_on_a_folder_of_the_user(tmp_path: Path, interpreter: Interpreter) -> None:
    make_pictures(tmp_path, 60)
    options = ("--data", str(tmp_path), "--pictures", "40", "--epochs", "1", "--workers", "1")
    done = interpreter.run(QUICK, *ARGUMENTS, *options)
    assert done.code == 0, done.err
    assert "40 pictures in 4 classes" in done.out
    assert "making pictures" not in done.out
    assert len(list(tmp_path.rglob("*.jpg"))) == 60, "the user's files stay"


@pytest.mark.slow
def test_demo_on_a_cache_that_is_too_small_for_all(interpreter: Interpreter) -> None:
    done = interpreter.run(QUICK, *ARGUMENTS, "--pictures", "64", "--epochs", "2", "--capacity", "2MiB")
    assert done.code == 0, done.err
    hits = int(rows(done.out, "What happened")[3][-1].rstrip("%"))
    assert 10 < hits < 90


def test_demo_names_a_file_that_is_no_picture(tmp_path: Path, store_root: Path, interpreter: Interpreter) -> None:
    make_pictures(tmp_path, 12)
    bad = tmp_path / "discs" / "bad.jpg"
    bad.write_text("no picture")
    done = interpreter.run(QUICK, *ARGUMENTS, "--data", str(tmp_path))
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert str(bad) in done.err
    assert "Traceback" not in done.err
    assert not list(store_root.iterdir())


def test_bounds_follow_the_model() -> None:
    rates = Rates(
        storage=600, cache=60_000, prep_miss=800, prep_hit=40_000, compute=4_000, workers=2, threads=1, cores=2
    )
    cold, warm, half = rates.bound(0), rates.bound(1), rates.bound(0.5)
    assert (cold.fetch, cold.prep, cold.compute, cold.rate) == pytest.approx((600, 800, 4_000, 600))
    assert (warm.fetch, warm.prep, warm.compute, warm.rate) == pytest.approx((60_000, 40_000, 4_000, 4_000))
    assert half.fetch == pytest.approx(1 / (0.5 / 60_000 + 0.5 / 600))
    assert rates.cpu_limit(0) == pytest.approx(2 / (2 / 800 + 1 / 4_000))


def test_a_device_of_its_own_shares_no_cores() -> None:
    rates = Rates(storage=1, cache=1, prep_miss=1, prep_hit=1, compute=1, workers=2, threads=1, cores=None)
    assert rates.cpu_limit(0.5) == float("inf")
