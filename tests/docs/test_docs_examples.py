"""Every public name has a docstring with a short first line and an example that runs.

The rule: each class and function has an `Example:` of 2 to 6 lines. Methods and properties need none, but theirs are
run as well. The first docstring line of all of them, and of modules, has less than 15 words. An example that cannot run
everywhere begins with the comment `# needs ...`, and is run if that is a package which is installed, else compiled.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from doc_names import Example, example, methods, public
from doc_runs import Part, tracebacks
from doc_setups import EXAMPLES, EXAMPLES_BEFORE

from warm import Interpreter

_PUBLIC = public()
_ALL = _PUBLIC | {f"{name}.{inner}": method for name, value in _PUBLIC.items() for inner, method in methods(value)}
_SHOWN = {name: shown for name, value in _ALL.items() if not inspect.ismodule(value) and (shown := example(value))}
_NOT_HERE = {"a GPU", "a script with a main guard", "a tier", "Ray", "Redis"}
"""What examples may need that a test of one line does not have; other tests use these parts."""


def _runs(shown: Example) -> bool:
    """Whether an example can run here."""
    return shown.needs not in _NOT_HERE and (not shown.needs or find_spec(shown.needs) is not None)


def _takes_arguments(value: Any) -> bool:
    """Whether users call it with arguments: not modules, protocols, test suites and errors."""
    if inspect.isclass(value):
        return "__init__" in vars(value) and not issubclass(value, Exception) and not getattr(value, "_is_protocol", 0)
    return inspect.isfunction(value)


@pytest.mark.parametrize("name", _ALL)
def test_first_docstring_line_is_short(name: str) -> None:
    first, *rest = (inspect.getdoc(_ALL[name]) or "").split("\n")
    assert 0 < len(first.split()) < 15, first
    assert first.endswith((".", ":")), first
    assert not rest or not rest[0], "the first line is followed by an empty one"


@pytest.mark.parametrize("name", [name for name, value in _PUBLIC.items() if not inspect.ismodule(value)])
def test_each_class_and_function_has_an_example(name: str) -> None:
    assert name in _SHOWN, "the docstring must end with `Example:` and a block of Python"


@pytest.mark.parametrize("name", [name for name, value in _PUBLIC.items() if _takes_arguments(value)])
def test_arguments_are_described(name: str) -> None:
    """In `Args:`, for a dataclass in `Attributes:`; or named in the text."""
    text = inspect.getdoc(_PUBLIC[name]) or ""
    value = _PUBLIC[name]
    for parameter in inspect.get_annotations(value) if is_dataclass(value) else inspect.signature(value).parameters:
        named = re.search(rf"(^ *|, ){parameter}(:|,)|`{parameter}`", text, re.MULTILINE)
        assert named or "Args: those of" in text, f"{parameter} is not described"


@pytest.mark.parametrize("name", _SHOWN)
def test_examples_are_short_and_compile(name: str) -> None:
    shown = _SHOWN[name]
    lines = [line for line in shown.code.splitlines() if line and not line.startswith("# needs ")]
    assert 2 <= len(lines) <= 6
    assert max(map(len, lines)) <= 100
    assert not shown.needs or shown.needs in _NOT_HERE or shown.needs.islower(), "what it needs is no known thing"
    compile(shown.code, shown.place, "exec")


@pytest.fixture(scope="module")
def came(interpreter: Interpreter, store_root: Path) -> dict[str, str]:
    """The tracebacks of the examples that failed."""
    pieces = {}
    for name, shown in _SHOWN.items():
        if _runs(shown):
            code = shown.code.replace("seconds=10", "seconds=0.1")
            before = EXAMPLES + EXAMPLES_BEFORE.get(name, "")
            pieces[name] = [Part("setup", 1, "", before), Part(shown.place, shown.line, "", code)]
    return tracebacks(interpreter, store_root, pieces)


@pytest.mark.parametrize("name", [name for name, shown in _SHOWN.items() if _runs(shown)])
def test_example_runs(name: str, came: dict[str, str]) -> None:
    """A traceback names the file of the docstring and the line in it."""
    assert name not in came, came[name]
