"""Each variation of a transform's code or values has another fingerprint, and the same in every process."""

from __future__ import annotations

import json
import re

import pytest
from variations import SOURCES

from warm import Interpreter

PROGRAM = """
import importlib, json, sys
from pathlib import Path
from stallfree.pipeline.fingerprint import fingerprint, tolerant

folder, *sources = json.loads(Path(sys.argv[1]).read_text())
for number, source in enumerate(sources):
    for text in f"# file: main{number}.py\\n{source.replace('P', str(number))}".split("# file: ")[1:]:
        name, _, content = text.partition("\\n")
        file = Path(folder, str(number), name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    sys.path.insert(0, str(Path(folder, str(number))))
    with tolerant():
        print(fingerprint(importlib.import_module(f"main{number}").transform))
"""


@pytest.fixture(scope="module")
def prints(interpreter: Interpreter, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The fingerprints of all variations: the first of each, the second, and the first in another folder."""
    found = []
    for choice in (r"\1", r"\2", r"\1"):
        folder = tmp_path_factory.mktemp("project")
        sources = [re.sub("<(.*?)\\|(.*?)>", choice, source) for source in SOURCES]
        (folder / "sources.json").write_text(json.dumps([str(folder), *sources]))
        done = interpreter.run(PROGRAM, str(folder / "sources.json"))
        assert done.code == 0, done.err
        found.append(done.out.split())
    return found


@pytest.mark.parametrize("number", range(len(SOURCES)), ids=SOURCES)
def test_a_variation_has_another_fingerprint(number: int, prints: list[list[str]]) -> None:
    first, second, again = (each[number] for each in prints)
    assert first != second
    assert first == again
