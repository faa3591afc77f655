"""Which files are in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stallfree.analysis.job import drop_pages, read_file, resident_share


def on_disk(folder: Path) -> bool:
    """Whether files in `folder` can be put out of memory, which those of a file system in memory cannot."""
    probe = folder / "probe"
    probe.write_bytes(os.urandom(1 << 16))
    drop_pages([str(probe)])
    return resident_share([str(probe)]) == 0.0


def test_files_are_drop_pages_and_brought_in(tmp_path: Path) -> None:
    if not on_disk(tmp_path):
        pytest.skip("temporary files lie in a file system that does not let go of its pages")
    paths = []
    for number in range(4):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(os.urandom(50_000))
        paths.append(str(path))
    assert resident_share(paths) == 1.0
    drop_pages(paths)
    assert resident_share(paths) == 0.0
    read_file(paths[0])
    assert resident_share(paths) == pytest.approx(0.25)


def test_what_cannot_be_looked_at_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    missing = str(tmp_path / "missing")
    drop_pages([missing])
    read_file(missing)
    assert resident_share([missing, str(tmp_path / "empty")]) is None
