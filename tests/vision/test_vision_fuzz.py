"""Damaged pictures must not end the process, nor make it write where it should not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vision_data import compiler

from stallfree.vision import crops

HERE = Path(__file__).resolve().parent
SOURCE = Path(crops.__file__).with_name("_native.c")


def run_fuzz(library: Path, count: int, **environment: str) -> str:
    """What the fuzz says about `count` pictures; fails if it does not end well."""
    command = [sys.executable, str(HERE / "fuzz_native.py"), str(library), str(count), "7"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("count", [300, pytest.param(40_000, marks=pytest.mark.slow)])
def test_damaged_pictures(count: int) -> None:
    if crops.library() is None:
        pytest.skip("the compiled part is not there")
    said = run_fuzz(crops.LIBRARY, count)
    for outcome in ("done", "unreadable", "bad argument"):  # it got as far as that
        assert outcome in said


@pytest.mark.slow
def test_damaged_pictures_under_sanitizers(tmp_path: Path) -> None:
    gcc = compiler("gcc")
    library = tmp_path / "checked.so"
    flags = ["-std=gnu11", "-O1", "-g", "-DNO_CLONES", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    libraries = ["-ljpeg", "-lm", "-ldl"]
    subprocess.run([gcc, *flags, "-fPIC", "-shared", str(SOURCE), "-o", str(library), *libraries], check=True)
    asan = subprocess.run([gcc, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    said = run_fuzz(
        library, 10_000, LD_PRELOAD=asan.stdout.strip(), ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1"
    )
    assert "unreadable" in said
