"""Each variation of a transform's code or values has another fingerprint, and the same in every process."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stallfree.ipc.process import call_in_child

TEXT = r"""
def transform(v): return v + <1|2>
---
def transform(v, *, by=<1|2>): return v * by
---
def transform(v):
    def inner(): return <1|2>
    return v * inner()
---
def transform(v):
    try: return v[0]
    except <KeyError|IndexError>: return v
---
def transform(v): return v * transform.by
transform.by = <1|2>
---
def make(by): return lambda v: v * by
transform = make(<1|2>)
---
BY = <1|2>
def transform(v): return v * BY
---
OPS = {'f': lambda v: v + <1|2>}
def transform(v): return OPS['f'](v)
---
import argparse, os
args = argparse.Namespace(log=open(os.devnull), by=<1|2>)
args.log.close()
def transform(v): return v * args.by
---
import enum
class Of(enum.Enum):
    A = 1
    def by(self): return <1|2>
OF = Of.A
def transform(v): return v * OF.by()
---
import contextvars
BY = contextvars.ContextVar('by', default=<1|2>)
def transform(v): return v * BY.get()
---
import functools
def f(v, by): return v * by
transform = functools.partial(f, by=<1|2>)
---
import functools
def twice(f):
    @functools.wraps(f)
    def inner(v): return f(f(v))
    return inner
@twice
def transform(v): return v * <2|3>
---
class T:
    __slots__ = ('by',)
    def __call__(self, v): return v * self.by
transform = T()
transform.by = <1|2>
---
import collections
OF = collections.defaultdict(lambda: <1|2>)
def transform(v): return OF[v]
---
import toolsP
def transform(v): return v * toolsP.BY
# file: toolsP.py
BY = <1|2>
---
from toolsP import f
def transform(v): return f(v)
# file: toolsP.py
BY = <1|2>
def f(v): return v * BY
---
import pkgP.sub
def transform(v): return pkgP.sub.OF.f(v)
# file: pkgP/sub.py
class OF:
    @staticmethod
    def f(v): return v * <1|2>
---
import pkgP.sub
def transform(v): return pkgP.sub.f(v)
# file: pkgP/sub.py
import pkgP.of.it
def f(v): return v * pkgP.of.it.BY
# file: pkgP/of/it.py
BY = <1|2>
---
def transform(v):
    import pkgP.sub
    return v * pkgP.sub.BY
# file: pkgP/sub.py
BY = <1|2>
---
from pkgP.it.that import f as transform
# file: pkgP/__init__.py
# file: pkgP/it/__init__.py
# file: pkgP/it/that.py
def f(v):
    from .. import sub
    return v * sub.BY
# file: pkgP/sub.py
BY = <1|2>
---
def transform(v):
    from pkgP.sub import f
    return f(v)
# file: pkgP/__init__.py
# file: pkgP/sub.py
from .it import BY
def f(v): return v * BY
# file: pkgP/it.py
BY = <1|2>
---
def transform(v, among=frozenset({'cat', 'dog', 'cow', 'hen'})): return v in {'x', 'y', 'z'} or v in among or <1|2>
---
import dataclasses, enum
WORDS = {'cat', 'dog', 'cow', 'hen'}
class Mode(enum.Enum): A = frozenset(WORDS)
@dataclasses.dataclass
class T:
    names: set = dataclasses.field(default_factory=lambda: set(WORDS))
    kinds = frozenset(WORDS), <1|2>
    mode = Mode.A
    def __call__(self, v): return v in self.names or v in self.kinds or self.mode
transform = T()
"""
"""Transforms in two variations each: `<1|2>` is one of two texts, which changes what the transform does.

`# file: name.py` begins another file of the same project; `P` in names of modules is the number of the project.
"""

MEMBERS = {
    "def f(self): return <1|2>": "self.f()", "def __init__(self): self.f = <1|2>": "self.f",
    "@staticmethod\n    def f(): return <1|2>": "self.f()", "f = <1|2>": "self.f",
    "@property\n    def f(self): return <1|2>": "self.f",
    "@functools.cached_property\n    def f(self): return <1|2>": "self.f",
    "f = type('D', (), {'__get__': lambda *_: <1|2>})()": "self.f",
    "f = type('M', (type,), {'by': <1|2>})('C', (), {})": "type(self.f).by",
}  # fmt: skip
"""Members of a class, and how its `__call__` uses them."""

CLASS = "import functools\nclass B:\n    {}\nclass T(B):\n    def __call__(self, v): return v * {}\ntransform = T()"
SOURCES = TEXT.strip().split("\n---\n") + [CLASS.format(*member) for member in MEMBERS.items()]

PROGRAM = """
import importlib, json, sys
from pathlib import Path
from stallfree.pipeline.fingerprint import fingerprint, tolerant
def prints(folder, sources, script):
    found = []
    for number, source in enumerate(sources):
        for text in f"# file: main{number}.py\\n{source.replace('P', str(number))}".split("# file: ")[1:]:
            name, _, content = text.partition("\\n")
            file = Path(folder, str(number), name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        sys.path.insert(0, str(Path(folder, str(number))))
        names = vars(sys.modules["__main__"] if script else importlib.import_module(f"main{number}"))
        if script: exec(Path(folder, str(number), f"main{number}.py").read_text(), names)
        with tolerant(): found.append(fingerprint(names["transform"]))
    return found
"""


@pytest.fixture(scope="module")
def prints(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The fingerprints of all variations: of the first of each, of the second, and of the first elsewhere.

    That is as a script in another folder and another process, in which strings have other hashes.
    """
    first, second = ([re.sub("<(.*?)\\|(.*?)>", choice, text) for text in SOURCES] for choice in (r"\1", r"\2"))
    names: dict[str, Any] = {}
    exec(PROGRAM, names)
    folders = [tmp_path_factory.mktemp("project") for _ in range(3)]
    here = [
        call_in_child(partial(names["prints"], folder, sources, False), "fingerprints")
        for folder, sources in zip(folders, (first, second), strict=False)
    ]
    (folders[2] / "sources.json").write_text(json.dumps(first))
    code = f"{PROGRAM}\nprint(json.dumps(prints('.', json.loads(Path('sources.json').read_text()), True)))"
    library = Path(sys.modules["stallfree"].__file__ or "").parents[1]
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folders[2], env=environment, capture_output=True, text=True, check=True
    )
    return [*here, json.loads(done.stdout)]


@pytest.mark.parametrize("number", range(len(SOURCES)), ids=SOURCES)
def test_a_variation_has_another_fingerprint(number: int, prints: list[list[str]]) -> None:
    first, second, again = (each[number] for each in prints)
    assert first != second
    assert first == again
