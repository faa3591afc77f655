"""The public names: what `import stallfree` gives and the pages of the reference describe."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from doc_pages import PAGES, ROOT

import stallfree as sf

_ENTRY = re.compile(r"^::: (stallfree\.\S+)$", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example:\n    ```python\n(?P<code>(?:    .*\n|\n)+?)    ```\Z", re.MULTILINE)


def public() -> dict[str, Any]:
    """Every public class, function and module by its full name."""
    names = {f"stallfree.{name}" for name in sf.__all__}
    names |= {f"stallfree.{name}.{member}" for name in sf.__all__ for member in _members(getattr(sf, name))}
    for page in PAGES:
        if page.parent.name == "reference":
            names |= set(_ENTRY.findall(page.read_text()))
    return {name: _named(name) for name in sorted(names)}


def _members(value: Any) -> list[str]:
    return value.__all__ if inspect.ismodule(value) else []


def _named(name: str) -> Any:
    """The object behind a full name, whose modules need not be imported yet."""
    value: Any = sf
    for number, part in enumerate(name.split(".")[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(name.split(".")[:number]))
        value = getattr(value, part)
    return value


def methods(value: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, but the tests of a test suite."""
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        if name.startswith(("_", "test_")):
            continue
        plain = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(plain):
            yield name, plain


class Example(NamedTuple):
    """The example of a docstring.

    Attributes:
        place: file of the docstring, relative to the root.
        line: of the first line of the code in it.
        code: the code.
    """

    place: str
    line: int
    code: str

    @property
    def needs(self) -> str:
        """What it needs beside stallfree's own requirements, as its first line says; empty for nothing."""
        found = re.match(r"# needs (.+)", self.code)
        return found[1] if found else ""


def example(value: Any) -> Example | None:
    """The example of a class or function; None if its docstring has none."""
    plain = inspect.unwrap(value)
    text = inspect.cleandoc(plain.__doc__ or "")
    found = _EXAMPLE.search(text)
    if found is None:
        return None
    code = textwrap.dedent(found["code"])
    file = Path(inspect.getsourcefile(plain) or "")
    begins = _line_of_docstring(file, plain.__qualname__) + text.count("\n", 0, found.start("code"))
    return Example(file.relative_to(ROOT).as_posix(), begins, code)


def _line_of_docstring(file: Path, name: str) -> int:
    """The line on which the docstring of a class or function begins."""
    node: Any = ast.parse(file.read_text())
    for part in name.split("."):
        named = [inner for inner in ast.walk(node) if getattr(inner, "name", None) == part]
        node = next(inner for inner in named if part != name.split(".")[-1] or ast.get_docstring(inner))
    return int(node.body[0].lineno)
