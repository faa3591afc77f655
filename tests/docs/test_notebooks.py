"""The notebooks run from top to bottom, and hold no output of an earlier run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT
from doc_runs import Part, tracebacks
from doc_setups import SETUPS

from warm import Interpreter

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def _code(path: Path) -> list[dict[str, Any]]:
    """The cells of code, in order."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_run_in_order(path: Path, interpreter: Interpreter, store_root: Path) -> None:
    shrink = SETUPS[f"examples/{path.name}"].shrink
    cells = ["".join(cell["source"]) for cell in _code(path)]
    parts = [Part(f"{path.name}[{number}]", 1, "", shrink(cell)) for number, cell in enumerate(cells, 1)]
    failed = tracebacks(interpreter, store_root, {path.name: parts})
    assert not failed, failed[path.name]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_is_kept(path: Path) -> None:
    for cell in _code(path):
        assert not cell["outputs"]
        assert cell["execution_count"] is None


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS
