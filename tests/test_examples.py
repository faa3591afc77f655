"""Every example runs, says something, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
NEEDS = {"ray_tune": "ray", "optuna": "optuna"}
"""What an example needs beyond stallfree; the extra has the same name."""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """In which an example runs. Ray's sockets need a short path, and its token need not go to the user's home."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short:
        ray = {"RAY_TMPDIR": short, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        yield os.environ | {"PYTHONWARNINGS": "error::ResourceWarning", "TMPDIR": str(tmp_path)} | ray


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path, store_root: Path, environment: dict[str, str]) -> None:
    package = NEEDS.get(path.stem)
    if package and find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'stallfree[{package}]'")
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{path.name} failed:\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), f"{path.name} prints nothing"
    assert "Traceback" not in done.stderr, done.stderr
    assert not list(store_root.iterdir()), f"{path.name} left a cache behind"
    left = [entry.name for entry in tmp_path.iterdir() if not entry.name.startswith("torchinductor_")]
    assert not left, f"{path.name} left files behind"
    if package:
        check_search(done.stdout)


def check_search(printed: str) -> None:
    """Trials were ended early, all others had every epoch, and together they decoded less often than they trained."""
    trials, early = map(int, re.findall(r"(\d+) trials, (\d+) of them ended early", printed)[0])
    epochs, decodes = re.findall(r"trained for (\d+) epochs.* decoded ([\d.]+) times", printed)[0]
    assert trials == 8
    assert 1 <= early < trials, printed
    assert int(epochs) >= 9 * (trials - early), printed
    assert 1 <= float(decodes) < int(epochs), printed
