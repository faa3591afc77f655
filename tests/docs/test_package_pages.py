"""The page of each package: every file has a line, and packages stay small."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import stallfree

ROOT = Path(stallfree.__file__).parent
FOLDERS = sorted({path.parent for path in ROOT.rglob("*.py")} - {ROOT})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_each_package_is_small_and_its_page_has_a_line_for_each_file(folder: Path) -> None:
    files = {path.name for path in folder.glob("*.py")}
    assert len(files) <= 16
    page = folder / "README.md"
    if page.exists() or len(files) > 5:
        listed = re.findall(r"^\| `(\w+\.py)` \|", page.read_text(), re.MULTILINE)
        assert sorted(listed) == sorted(files - {"__init__.py"})


def imported(path: Path, modules: set[str]) -> set[str]:
    """The modules of `modules` that a file imports: anywhere in it, for types too."""
    froms = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    names = {name for node in froms for one in node.names for name in (f"{node.module}.{one.name}", str(node.module))}
    return names & modules


def test_no_modules_import_one_another() -> None:
    files = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
    modules = {name for name in files if not name.endswith("__init__")}
    assert len(modules) > 100
    order = list(TopologicalSorter({name: imported(files[name], modules) for name in modules}).static_order())
    assert len(order) == len(modules)  # else it has raised CycleError
