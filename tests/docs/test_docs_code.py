"""The code of the documentation runs: the blocks of its pages, the notebooks, and the examples of the public names.

An example that cannot run everywhere begins with the comment `# needs ...`, and is run if that is a package which is
installed, else compiled.
"""

import inspect
import json
import re
import textwrap
from dataclasses import is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from doc_setups import EXAMPLES, EXAMPLES_BEFORE, WORLD, WORLDS, shrink
from doc_tools import PAGES, REFERENCE, ROOT, blocks, methods, name_of, named

from warm import Interpreter


class Part(NamedTuple):
    """Code that is run: its file and line for tracebacks, the file that it is written to first ("" for none)."""

    place: str
    line: int
    file: str
    code: str


def of_page(page: Path) -> list[Part]:
    parts = [Part("setup", 1, "", WORLDS.get(name_of(page), WORLD))]
    for block in (block for block in blocks(page, "python") if block.runs):
        file = block.title if block.title.endswith(".py") and " " not in block.title else ""
        parts.append(Part(block.page, block.line, file, shrink(block.text)))
    return parts


def of_notebook(path: Path) -> list[Part]:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] is not None for cell in cells), "it keeps its output"
    return [Part(f"{path.name}[{at}]", 1, "", shrink("".join(cell["source"]))) for at, cell in enumerate(cells, 1)]


def of_example(name: str) -> list[Part]:
    before = EXAMPLES + EXAMPLES_BEFORE.get(name, "")
    return [Part("setup", 1, "", before), Part(name, 1, "", examples()[name].replace("seconds=10", "seconds=0.1"))]


def example(value: Any) -> str:
    """The code of the example of a class or function; empty if its docstring has none."""
    text = inspect.getdoc(value) or ""
    shown = re.search(r"^Example:\n    ```python\n((?:    .*\n|\n)+?)    ```\Z", text, re.MULTILINE)
    return textwrap.dedent(shown[1]) if shown else ""


def needs(code: str) -> str:
    """What an example needs beside stallfree's own requirements, as its first line says; empty for nothing."""
    return code.removeprefix("# needs ").split("\n")[0] if code.startswith("# needs ") else ""


@cache
def public() -> dict[str, Any]:
    """The public classes and functions: not looked up earlier, since integrations import large libraries."""
    return {name: named(name) for name in sorted(set(REFERENCE)) if not inspect.ismodule(named(name))}


@cache
def examples() -> dict[str, str]:
    """The examples of the public names and their methods."""
    values = public() | {f"{name}.{inner}": made for name, value in public().items() for inner, made in methods(value)}
    return {name: code for name, value in values.items() if (code := example(inspect.unwrap(value)))}


NOT_HERE = {"a GPU", "a script with a main guard", "a tier", "Ray", "Redis"}  # what examples may need; tested elsewhere


def pieces_of(pages: bool) -> dict[str, list[Part]]:
    """What is run: the pages and notebooks, or the examples."""
    if pages:
        notebooks = {name_of(path): of_notebook(path) for path in sorted((ROOT / "examples").glob("*.ipynb"))}
        return {name_of(page): of_page(page) for page in PAGES if blocks(page, "python")} | notebooks
    return {
        name: of_example(name) for name, code in examples().items()
        if needs(code) not in NOT_HERE and (not needs(code) or find_spec(needs(code)) is not None)
    }  # fmt: skip


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
                    with open(file, "w") as opened: opened.write(code)
                exec(compile("\\n" * (line - 1) + code, place, "exec"), space)
    except BaseException:
        came[name] = traceback.format_exc()
    space.clear(), gc.collect()
    for module in ("train", "job"):  # files of the page
        sys.modules.pop(module, None)
    del sys.path[0]
    os.chdir(top)
print("came of it:", json.dumps(came))
"""
"""All pieces in one process, each in a folder and a namespace of its own: what one imports, all have."""

QUICK = ["README.md", "docs/tutorial.md"]
QUICK += ["DataLoader", "CachedDataset", "DevicePrefetcher", "Report.load", "ImageFolder"]


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "all"])
@pytest.mark.parametrize("pages", [True, False], ids=["pages", "examples"])
def test_code_runs(pages: bool, all_of_them: bool, interpreter: Interpreter, store_root: Path) -> None:
    """A traceback names the page or the public name, and the line."""
    parts = [(name, piece) for name, piece in pieces_of(pages).items() if all_of_them or name in QUICK]
    ended = interpreter.run(_RUNNER.format(pieces=json.dumps(parts)))
    assert ended.code == 0, ended.err
    assert not list(store_root.iterdir()), "a cache was left behind"
    failed: dict[str, str] = json.loads(ended.out.rsplit("came of it: ")[-1])
    assert not failed, "\n".join(failed.values())
    assert "Traceback" not in ended.err, ended.err


def test_each_has_an_example_of_few_lines() -> None:
    assert sorted(set(public()) - set(examples())) == []
    for name, code in examples().items():
        lines = [line for line in code.splitlines() if line and not line.startswith("# needs ")]
        assert 2 <= len(lines) <= 6, name
        assert needs(code) in NOT_HERE or needs(code).islower() or not needs(code), f"{name} needs no known thing"
        compile(code, name, "exec")


def test_arguments_are_described() -> None:
    """In `Args:` or `Attributes:`, or named in the text. What is described exists."""
    for name, value in public().items():
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
