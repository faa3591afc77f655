"""The scan of names finds every source of randomness that user code names, and little else."""

# ruff: noqa: E501
from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from stallfree.pipeline.classify.names import random_name
from stallfree.pipeline.classify.reached import read_attributes

HEAD = """
import collections, contextvars, enum, functools, random, sys, threading, types, weakref
import numpy as np, torch
def make(): return np.random.default_rng(1)
"""

RANDOM = {
    "default_rng": "def f(x): return x + np.random.default_rng().normal()",
    "rand": "def f(x): return x + np.random.rand()",
    "torch.rand": "def f(x): return x + torch.rand(())",
    "normal_": "def f(x): return x.clone().normal_()",
    "random": "def f(x): return x + random.random()",
    "gauss": "from random import gauss as g\ndef f(x): return g(x, 1)",
    "Random": "class R:\n    def __call__(self, x): return random.Random().sample(x, 1)\nf = R()",
    "SystemRandom": "S = random.SystemRandom()\ndef f(x): return S.choice(x)",
    "token_bytes": "import secrets\ndef f(x): return secrets.token_bytes(3)",
    "urandom": "def f(x):\n    import os\n    return os.urandom(3)",
    "uuid4": "def f(x):\n    from uuid import uuid4 as u\n    return u()",
    "f": "from numpy.random import rand as f",
    "RNG": "RNG = make()\ndef f(x): return RNG.normal()",
    "g": "from types import SimpleNamespace as S\nns = S(g=make())\ndef f(x): return ns.g.normal()",
    "class attribute": "class C: RNG = make()\ndef f(x): return C.RNG.normal()",
    "class method": "class C:\n    R = make()\n    @classmethod\n    def get(cls): return cls.R\ndef f(x): return C.get().normal()",
    "static method": "class C:\n    @staticmethod\n    def f(x): return C.R.normal()\nC.R = make()\nf = C.f",
    "function attribute": "def f(x): return f.rng.normal()\nf.rng = make()",
    "context variable": "V = contextvars.ContextVar('v', default=make())\ndef f(x): return V.get().normal()",
    "list": "class C:\n    L = [make()]\n    def __call__(self, x): return self.L[0].normal()\nf = C()",
    "attribute": "class C:\n    def __init__(self): self.r = make()\n    def __call__(self, x): return self.r.normal()\nf = C()",
    "property": "R = make()\nclass C:\n    @property\n    def r(self): return R\n    def __call__(self, x): return self.r.normal()\nf = C()",
    "slots": "class C: __slots__ = ('r',)\nc = C()\nc.r = make()\ndef f(x): return c.r.normal()",
    "lru_cache": "@functools.lru_cache\ndef made(): return make()\ndef f(x): return made().normal()",
    "closure": "def outer():\n    r = make()\n    return lambda x: r.normal()\nf = outer()",
    "default": "def f(x, r=make()): return r.normal()",
    "bound": "b = make().normal\ndef f(x): return b()",
    "deque": "d = collections.deque([make()])\ndef f(x): return d[0].normal()",
    "weak": "class C: pass\nc = C()\nc.r = make()\nw = weakref.ref(c)\ndef f(x): return w().r.normal()",
    "module": "class M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.r = make()\n    def forward(self, x): return self.r.normal()\nf = M()",
    "helper": "def inner(x): return make().normal()\ndef f(x): return inner(x)",
    "method": "class C:\n    def step(self, x): return make()\n    def __call__(self, x): return self.step(x)\nf = C()",
    "of a base": "class B:\n    def step(self, x): return make()\nclass C(B):\n    def __call__(self, x): return self.step(x)\nf = C()",
    "of what it holds": "class H:\n    def read(self, x): return make()\nclass C:\n    def __init__(self): self.h = H()\n    def __getitem__(self, x): return self.h.read(x)\nf = C()",
    "of what is in a list": "class H:\n    def __call__(self, x): return make()\nclass C:\n    def __init__(self): self.h = [H()]\n    def __getitem__(self, x): return self.h[0](x)\nf = C()",
    "of a subset": "class D:\n    def __getitem__(self, x): return make()\nf = torch.utils.data.Subset(D(), [0])",
    "made in the call": "class H:\n    def __init__(self): self.r = make()\ndef f(x): return H().r.integers(3)",
    "partial": "def g(x, r): return r.normal()\nf = functools.partial(g, r=make())",
    "wrapped": "def w(g):\n    @functools.wraps(g)\n    def inner(x): return g(x)\n    return inner\n@w\ndef f(x): return make()",
    "no_grad": "@torch.no_grad()\ndef f(x): return make()",
    "__getitems__": "class C:\n    def __getitems__(self, ids): return make()\nf = C()",
    "random_noise": "def f(x):\n    from skimage.util import random_noise\n    return random_noise(x)",
    "effect_spread": "def f(x): return x.effect_spread(3)",
    "randn": "cv2 = types.ModuleType('cv2')\ndef f(x): return cv2.randn(x, 0, 1)",
}

STEADY = {
    "named alike": "class C:\n    random_state = 0\n    def random_crop(self, x): return x\n    def __call__(self, x): return self.random_crop(x, self.random_state)\nf = C()",
    "a flag": "class C:\n    def __init__(self): self.shuffle = self.random = False\n    def __getitem__(self, i): return i if self.shuffle or self.random else -i\nf = C()",
    "a flag of args": "args = types.SimpleNamespace(shuffle=False, choice=1)\ndef f(x): return x if args.shuffle else args.choice",
    "a parameter": "def g(x, random_state=0): return x\ndef f(x, shuffle=False): return g(x, random_state=0)",
    "a function of that name": "def shuffle(x): return x[::-1]\ndef f(x): return shuffle(x)",
    "in __init__": "class C:\n    def __init__(self): self.order = np.random.permutation(9)\n    def __getitem__(self, i): return self.order[i]\nf = C()",
    "in __init__, called by super": "class B:\n    def __call__(self, x): return x\nclass C(B):\n    def __init__(self): self.w = random.random()\n    def __call__(self, x): return super().__call__(x)\nf = C()",
    "not called": "class C:\n    def fresh(self): return random.random()\n    def __call__(self, x): return x\nf = C()",
    "not named": "class C:\n    def __init__(self): self.rng = make()\n    def __call__(self, x): return x\nf = C()",
    "unused": "RNG = make()\ndef f(x): return np.clip(x, 0, 1)",
    "annotated": "def f(x, rng: np.random.Generator | None = None): return x",
    "a clock": "def f(x):\n    import os, time\n    return x, time.time(), os.getpid(), id(x)",
    "a lock and a log": "import logging\nL = threading.Lock()\nlog = logging.getLogger('x')\ndef f(x):\n    with L: log.info('x')\n    return x",
    "a library": "def f(x): return torch.nn.functional.interpolate(x, 3).numpy().copy()",
    "sys.modules": "def f(x): return len(sys.modules)",
    "threads": "def f(x): return threading.current_thread().name",
    "a text": "def f(x): return x.replace('random', 'shuffle')",
}  # fmt: skip


def define(source: str) -> Any:
    module: dict[str, Any] = {"__name__": "users_module"}
    exec(compile(HEAD + source, "users.py", "exec"), module)
    return module["f"]


@pytest.mark.parametrize("name", RANDOM)
def test_a_source_is_found(name: str) -> None:
    assert random_name(define(RANDOM[name])) is not None


@pytest.mark.parametrize("name", STEADY)
def test_nothing_is_found(name: str) -> None:
    assert random_name(define(STEADY[name])) is None


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class Flip:\n    def __call__(self, x): return np.random.default_rng()\nf = Flip()", "np.random.default_rng in Flip.__call__"),
        ("R = make()\nclass Flip:\n    def __call__(self, x): return R.normal()\nf = Flip()", "R in Flip.__call__"),
        ("class Flip:\n    def __init__(self): self.g = make()\n    def __call__(self, x): return self.g.normal()\nf = Flip()", "g in Flip.__call__"),
        ("def helper(x): return x.random_()\ndef f(x): return helper(x)", "random_ in helper"),
    ],
)  # fmt: skip
def test_it_says_where(source: str, said: str) -> None:
    assert random_name(define(source)) == said


def test_what_is_read() -> None:
    source = """
    class C:
        def __init__(self): self.by, self.calls, self.last, self.unused = 2, 0, None, 1
        def scaled(self, x): return x * self.by
        def __call__(self, x):
            self.calls += 1
            self.last = x
            return [self.scaled(y) for y in x]
    f = C()
    """
    read = read_attributes(define(textwrap.dedent(source)))
    assert {"by", "scaled"} <= read
    assert not {"calls", "last", "unused"} & read


PROJECT = """
import numpy as np
RNG = np.random.default_rng(1)
class Flip:
    def __call__(self, x): return helper(x)
def helper(x): return x * RNG.normal()
def scale(x): return x * 2
"""


@pytest.mark.parametrize("source", ["", "file:///src/project"])
def test_an_installed_project(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it comes from a folder or from an index."""
    name = f"installed{len(source)}"
    site = tmp_path / "site-packages"
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(PROJECT)
    info = site / f"{name}-0.1.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(f"{name}/__init__.py,sha256=abc,9\n")
    (info / "INSTALLER").write_text("pip")
    if source:
        (info / "direct_url.json").write_text(source)
    monkeypatch.syspath_prepend(site)
    project = __import__(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, name, project)
    assert random_name(project.Flip()) == "RNG in helper"
    assert random_name(project.scale) is None
    assert random_name(lambda x: project.helper(x)) == "RNG in helper"
    assert random_name(lambda x: project.scale(x)) is None
