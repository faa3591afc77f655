"""The command line as such: version, help, errors."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from stallfree.cli import main
from stallfree.errors import DOCUMENTATION


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "stallfree"],
        pytest.param([str(Path(sys.executable).with_name("stallfree"))], marks=pytest.mark.slow),
    ],
)
def test_version(command: list[str]) -> None:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"stallfree {version('stallfree')}\n"


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `stallfree` with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["stallfree", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    assert isinstance(exit.value.code, int)
    return exit.value.code


@pytest.mark.parametrize("arguments", [("-h",), ()])
def test_help_names_the_commands(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(monkeypatch, *arguments)
    shown = "".join(capsys.readouterr())
    for word in ("Usage", "run", "analyze", "predict", "simulate", "replay", "top", "cache", "--version"):
        assert word in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("top", "--interval", "fast"), "'fast' is no time"),
        (("cache", "rm", "nobody"), "there is no cache 'nobody'"),
        (("cache", "rm", "../up"), "'../up'"),
    ],
)
def test_an_error_is_one_clear_line_and_a_link(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    said, link = shown.err.splitlines()
    assert words in said
    assert link.startswith(DOCUMENTATION)


@pytest.mark.parametrize("arguments", [("nonsense",), ("simulate", "--seeds", "none")])
def test_wrong_options(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_here(monkeypatch, *arguments) == 2
