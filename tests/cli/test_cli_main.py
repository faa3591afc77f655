"""The command line as such: version, help, errors."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest


def run_cli(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """`python -m stallfree` with these arguments."""
    command = [sys.executable, "-m", "stallfree", *arguments]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_version() -> None:
    done = run_cli("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"stallfree {version('stallfree')}\n", "")


def test_the_script_is_the_same_as_the_module() -> None:
    script = Path(sys.executable).with_name("stallfree")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == run_cli("--version").stdout


def test_help_names_the_commands() -> None:
    done = run_cli("--help")
    assert done.returncode == 0
    for word in ("stallfree", "demo", "cache", "--version"):
        assert word in done.stdout


def test_no_arguments_show_help() -> None:
    assert "Usage" in run_cli().stdout + run_cli().stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--bandwidth", "fast"), "bandwidth='fast' is no rate"),
        (("demo", "--capacity", "lots"), "capacity='lots' is no size"),
        (("demo", "--capacity", "-1GiB"), "capacity='-1GiB' is negative"),
        (("demo", "--data", "/there/is/no/such/folder"), "/there/is/no/such/folder"),
        (("cache", "rm", "nobody"), "there is no cache 'nobody'"),
        (("cache", "rm", "../up"), "'../up'"),
    ],
)
def test_an_error_is_one_clear_line(arguments: tuple[str, ...], words: str) -> None:
    done = run_cli(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.parametrize("arguments", [("nonsense",), ("demo", "--epochs", "0"), ("demo", "--workers", "none")])
def test_wrong_options(arguments: tuple[str, ...]) -> None:
    done = run_cli(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
