"""The command line as such: version, help, errors."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from children import until
from stallfree.cli import app, main
from stallfree.errors import DOCUMENTATION, MissingExtraError


def test_version() -> None:
    done = subprocess.run([sys.executable, "-m", "stallfree", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"stallfree {version('stallfree')}\n"


def test_help_names_the_commands_and_an_error_is_one_clear_line_and_a_link(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for arguments in ("", "nonsense", "cache rm nobody"):
        monkeypatch.setattr(sys, "argv", ["stallfree", *arguments.split()])
        with pytest.raises(SystemExit) as exit:
            main()
        assert exit.value.code == 2
        shown.append(capsys.readouterr())
    for word in ("Usage", "run", "analyze", "predict", "simulate", "replay", "cache", "--version"):
        assert word in shown[0].out + shown[0].err
    said, link = shown[2].err.splitlines()
    assert (shown[2].out, said.startswith("error: there is no cache 'nobody'")) == ("", True)
    assert link.startswith(DOCUMENTATION)


def commands(command: Any, *names: str) -> Iterator[tuple[str, ...]]:
    """The words of each command that does something."""
    below = getattr(command, "commands", {})
    if not below:
        yield names
    for name, one in below.items():
        yield from commands(one, *names, name)


COMMANDS = list(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_short_and_has_an_example(command: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"]).output
    assert f"Example: stallfree {' '.join(command)}" in shown
    assert not re.search(r"--(\S+) (?i:\1)\b", shown)  # typer 0.27.0 to 0.27.2 took such a word for the option's name
    assert "--json" in shown
    assert len(shown.splitlines()) <= 36
    assert max(map(len, shown.splitlines())) <= 80


SIMULATE = "simulate --loaders 3 --load 80ms --transfer 15ms --compute 30ms --seeds 1"


@pytest.mark.parametrize(
    ("arguments", "format"),
    [("replay --samples 100 --capacity 35%", "stallfree-replay"), (SIMULATE, "stallfree-simulation")],
)
def test_json_is_all_that_is_printed(arguments: str, format: str) -> None:
    done = CliRunner().invoke(app, [*arguments.split(), "--json", "-"], catch_exceptions=False)
    assert (done.exit_code, done.stderr, json.loads(done.stdout)["format"]) == (0, "", format)


@pytest.mark.parametrize("command", ["analyze absent.py:build", SIMULATE])
def test_a_page_without_plotly_is_refused_before_the_measurement(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtraError, match=r"stallfree\[report\]"):
        CliRunner().invoke(app, [*command.split(), "--html", "page.html"], catch_exceptions=False)


WAIT = """
import time
collate = lambda samples: open("begun", "w").close() or samples
def build():
    return list(range(400)), {"batch_size": 4, "num_workers": 1, "collate_fn": collate}, lambda _: time.sleep(0.01)
"""


def test_an_interrupt_ends_a_command_at_once(tmp_path: Path) -> None:
    """In a terminal: progress on standard error, then Ctrl-C: exit code 130, no traceback, no process left."""
    (tmp_path / "job.py").write_text(WAIT)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "stallfree", "analyze", "job.py:build", "--seconds", "2"]
    settings: dict[str, Any] = {"cwd": tmp_path, "env": os.environ | {"TERM": "xterm"}, "start_new_session": True}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, **settings)
    os.close(theirs)
    try:
        shown = ""
        while "measuring cold" not in shown:
            shown += os.read(ours, 4096).decode(errors="replace")
        (tmp_path / "begun").unlink(missing_ok=True)
        until((tmp_path / "begun").exists, "a worker makes a batch: torch's iterator is complete")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        with contextlib.suppress(OSError):  # raised when the last process closes it
            while more := os.read(ours, 4096):
                shown += more.decode(errors="replace")
        assert (process.communicate(timeout=60)[0], process.returncode) == (b"", 130), shown
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert "Traceback" not in shown
