"""The command line as such: version, help, errors."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from stallfree.cli import main
from warm import Interpreter


def run_cli(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """`python -m stallfree` with these arguments."""
    command = [sys.executable, "-m", "stallfree", *arguments]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_version() -> None:
    done = run_cli("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"stallfree {version('stallfree')}\n", "")


@pytest.mark.slow
def test_the_script_is_the_same_as_the_module() -> None:
    script = Path(sys.executable).with_name("stallfree")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == run_cli("--version").stdout


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `stallfree` with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["stallfree", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    assert isinstance(exit.value.code, int)
    return exit.value.code


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ()])
def test_help_names_the_commands(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(monkeypatch, *arguments)
    shown = "".join(capsys.readouterr())
    for word in ("Usage", "stallfree", "demo", "cache", "--version"):
        assert word in shown


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
def test_an_error_is_one_clear_line(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert words in shown.err


def test_an_error_shows_no_traceback(interpreter: Interpreter) -> None:
    done = interpreter.run("from stallfree.cli import main; main()", "cache", "rm", "nobody")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: there is no cache 'nobody'")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("nonsense",), ("demo", "--epochs", "0"), ("demo", "--workers", "none")])
def test_wrong_options(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_here(monkeypatch, *arguments) == 2
