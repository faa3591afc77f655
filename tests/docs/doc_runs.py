"""Runs pieces of the documentation, each in a folder and a namespace of its own."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from warm import Interpreter

_RUNNER = """
import gc, json, os, sys, traceback, warnings
top, came = os.getcwd(), {{}}
for name, parts in json.loads({pieces!r}):
    os.mkdir(name.replace("/", "-"))
    os.chdir(name.replace("/", "-"))
    sys.path.insert(0, os.getcwd())
    space = {{"__name__": "__main__"}}
    try:
        with warnings.catch_warnings():
            for place, line, file, code in parts:
                if file:
                    with open(file, "w") as opened:
                        opened.write(code)
                exec(compile("\\n" * (line - 1) + code, place, "exec"), space)
    except BaseException:
        came[name] = traceback.format_exc()
    space.clear()
    gc.collect()
    for module in ("train", "job"):  # files of the page
        sys.modules.pop(module, None)
    del sys.path[0]
    os.chdir(top)
print("came of it:", json.dumps(came))
"""
"""All pieces in one process: what the first one imports, the others need not."""


class Part(NamedTuple):
    """Code that is run: its file and line for tracebacks, the file that it is written to first ("" for none)."""

    place: str
    line: int
    file: str
    code: str


def tracebacks(interpreter: Interpreter, store_root: Path, pieces: dict[str, list[Part]]) -> dict[str, str]:
    """Run the parts of each piece in order. Returns the tracebacks of those that failed, by name."""
    ended = interpreter.run(_RUNNER.format(pieces=json.dumps(list(pieces.items()))))
    assert ended.code == 0, ended.err
    assert not list(store_root.iterdir()), "a cache was left behind"
    found: dict[str, str] = json.loads(ended.out.rsplit("came of it: ")[-1])
    assert found or "Traceback" not in ended.err, ended.err
    return found


def chosen(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values of a parameter of the tests of a module that are run in this session and use its fixture `came`."""
    items: list[Any] = [item for item in request.session.items if item.getparent(pytest.Module).obj is request.module]  # type: ignore[union-attr]
    return [item.callspec.params[name] for item in items if "came" in item.fixturenames]
