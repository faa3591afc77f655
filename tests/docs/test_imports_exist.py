"""What benchmarks and examples import of the package is there, within functions too."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_each_name_that_is_imported_exists(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "stallfree":
            assert node.module is not None
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                there = hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}") is not None
                assert there, f"line {node.lineno}: {node.module} has no {name}"
