"""Every example runs, says something, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path, store_root: Path) -> None:
    environment = os.environ | {"PYTHONWARNINGS": "error::ResourceWarning", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{path.name} failed:\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), f"{path.name} prints nothing"
    assert "Traceback" not in done.stderr, done.stderr
    assert not list(store_root.iterdir()), f"{path.name} left a cache behind"
    left = [entry.name for entry in tmp_path.iterdir() if not entry.name.startswith("torchinductor_")]
    assert not left, f"{path.name} left files behind"
