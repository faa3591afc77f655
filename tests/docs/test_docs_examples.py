"""Every public class and function has a docstring with an example that runs and a description of its arguments.

An example that cannot run everywhere begins with the comment `# needs ...`, and is run if that is a package which is
installed, else compiled.
"""

import inspect
import re
from dataclasses import is_dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_setups import EXAMPLES, EXAMPLES_BEFORE
from doc_tools import REFERENCE, Example, Part, chosen, example, methods, named, tracebacks

from warm import Interpreter

_PUBLIC = {name: named(name) for name in sorted(set(REFERENCE)) if not inspect.ismodule(named(name))}
_ALL = _PUBLIC | {f"{name}.{inner}": method for name, value in _PUBLIC.items() for inner, method in methods(value)}
_SHOWN = {name: shown for name, value in _ALL.items() if (shown := example(value))}
_NOT_HERE = {"a GPU", "a script with a main guard", "a tier", "Ray", "Redis"}
"""What examples may need that a test of one line does not have; other tests use these parts."""


def _runs(shown: Example) -> bool:
    """Whether an example can run here."""
    return shown.needs not in _NOT_HERE and (not shown.needs or find_spec(shown.needs) is not None)


def test_each_has_an_example_of_few_lines() -> None:
    assert sorted(set(_PUBLIC) - set(_SHOWN)) == []
    for name, shown in _SHOWN.items():
        lines = [line for line in shown.code.splitlines() if line and not line.startswith("# needs ")]
        assert 2 <= len(lines) <= 6, name
        assert not shown.needs or shown.needs in _NOT_HERE or shown.needs.islower(), f"{name} needs no known thing"
        compile(shown.code, shown.place, "exec")


def test_arguments_are_described() -> None:
    """In `Args:` or `Attributes:`, or named in the text. What is described exists."""
    for name, value in _PUBLIC.items():
        text = inspect.getdoc(value) or ""
        is_class = inspect.isclass(value) and "__init__" in vars(value) and not getattr(value, "_is_protocol", 0)
        if inspect.isfunction(value) or (is_class and not issubclass(value, Exception)):
            own = inspect.get_annotations(value) if is_dataclass(value) else inspect.signature(value).parameters
            for parameter in [name for name, kind in own.items() if name != "_" and "ClassVar" not in str(kind)]:
                mentioned = re.search(rf"(^ *|, ){parameter}(:|,)|`{parameter}`", text, re.MULTILINE)
                assert mentioned or "Args: those of" in text, f"{name}: {parameter}"
        section = re.search(r"^Args:\n((?:(?: .*)?\n)+)", text + "\n", re.MULTILINE)
        described = re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*):", section[1] if section else "", re.MULTILINE)
        for parameter in ", ".join(described).split(", ") if described else ():
            assert parameter in inspect.signature(value).parameters, f"{name}: {parameter} does not exist"


@pytest.fixture(scope="module")
def came(request: pytest.FixtureRequest, interpreter: Interpreter, store_root: Path) -> dict[str, str]:
    """The tracebacks of the examples that failed, of those that are tested now."""
    pieces = {}
    for name in chosen(request, "name"):
        code = _SHOWN[name].code.replace("seconds=10", "seconds=0.1")
        before = EXAMPLES + EXAMPLES_BEFORE.get(f"stallfree.{name}", "")
        pieces[name] = [Part("setup", 1, "", before), Part(_SHOWN[name].place, 1, "", code)]
    return tracebacks(interpreter, store_root, pieces)


_QUICK = {"DataLoader", "CachedDataset", "DevicePrefetcher", "Report.load", "ImageFolder"}
_NAMES = [name for name, shown in _SHOWN.items() if _runs(shown)]


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in _NAMES]
)
def test_example_runs(name: str, came: dict[str, str]) -> None:
    """A traceback names the class or function, and the line in its example."""
    assert name not in came, came[name]
