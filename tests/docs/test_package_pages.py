"""The page of each package: every file has a line, and packages stay small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import stallfree

ROOT = Path(stallfree.__file__).parent
FOLDERS = sorted({path.parent for path in ROOT.rglob("*.py")} - {ROOT})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_each_package_is_small_and_its_page_has_a_line_for_each_file(folder: Path) -> None:
    files = {path.name for path in folder.glob("*.py")}
    assert len(files) <= 15
    page = folder / "README.md"
    if page.exists() or len(files) > 5:
        listed = re.findall(r"^\| `(\w+\.py)` \|", page.read_text(), re.MULTILINE)
        assert sorted(listed) == sorted(files - {"__init__.py"})
