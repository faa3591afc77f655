"""The public names: what `import stallfree` gives and the pages of the reference describe, with their examples."""

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from doc_pages import PAGES

import stallfree as sf

_ENTRY = re.compile(r"^::: stallfree\.(\S+)$", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example:\n    ```python\n(?P<code>(?:    .*\n|\n)+?)    ```\Z", re.MULTILINE)

REFERENCE = [name for page in PAGES if page.parent.name == "reference" for name in _ENTRY.findall(page.read_text())]
"""The names that the pages of the reference describe."""


def named(name: str) -> Any:
    """The public object behind a dotted name, whose modules need not be imported yet."""
    value: Any = sf
    for number, part in enumerate(name.split("."), 1):
        if not hasattr(value, part):
            importlib.import_module(".".join(["stallfree", *name.split(".")[:number]]))
        value = getattr(value, part)
    return value


def methods(value: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, but the tests of a test suite."""
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        if not name.startswith(("_", "test_")):
            plain = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(plain):
                yield name, plain


class Example(NamedTuple):
    """The example of a docstring: where it is, and its code."""

    place: str
    code: str

    @property
    def needs(self) -> str:
        """What it needs beside stallfree's own requirements, as its first line says; empty for nothing."""
        needed = re.match(r"# needs (.+)", self.code)
        return needed[1] if needed else ""


def example(value: Any) -> Example | None:
    """The example of a class or function; None if its docstring has none."""
    plain = inspect.unwrap(value)
    shown = _EXAMPLE.search(inspect.getdoc(plain) or "")
    return Example(f"{plain.__module__}.{plain.__qualname__}", textwrap.dedent(shown["code"])) if shown else None
