"""The scan of names finds every source of randomness that user code names, and little else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from stallfree.pipeline.objects import random_name

HEAD = """
import collections, contextvars, enum, functools, random, sys, threading, types, weakref
import numpy as np, torch
def make(): return np.random.default_rng(1)
"""


RANDOM = r"""
--- Random
class R:
    def __call__(self, x): return random.Random().sample(x, 1)
f = R()
--- token_bytes
import secrets
def f(x): return secrets.token_bytes(3)
--- uuid4
def f(x):
    from uuid import uuid4 as u
    return u()
--- f
from numpy.random import rand as f
--- RNG
RNG = make()
def f(x): return RNG.normal()
--- class attribute
class C: RNG = make()
def f(x): return C.RNG.normal()
--- static method
class C:
    @staticmethod
    def f(x): return C.R.normal()
C.R = make()
f = C.f
--- context variable
V = contextvars.ContextVar('v', default=make())
def f(x): return V.get().normal()
--- attribute
class C:
    def __init__(self): self.r = make()
    def __call__(self, x): return self.r.normal()
f = C()
--- property
R = make()
class C:
    @property
    def r(self): return R
    def __call__(self, x): return self.r.normal()
f = C()
--- slots
class C: __slots__ = ('r',)
c = C()
c.r = make()
def f(x): return c.r.normal()
--- lru_cache
@functools.lru_cache
def made(): return make()
def f(x): return made().normal()
--- module
class M(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.r = make()
    def forward(self, x): return self.r.normal()
f = M()
--- helper
def inner(x): return make().normal()
def f(x): return inner(x)
--- method
class C:
    def step(self, x): return make()
    def __call__(self, x): return self.step(x)
f = C()
--- of what it holds
class H:
    def read(self, x): return make()
class C:
    def __init__(self): self.h = H()
    def __getitem__(self, x): return self.h.read(x)
f = C()
--- of a subset
class D:
    def __getitem__(self, x): return make()
f = torch.utils.data.Subset(D(), [0])
--- made in the call
class H:
    def __init__(self): self.r = make()
def f(x): return H().r.integers(3)
--- partial
def g(x, r): return r.normal()
f = functools.partial(g, r=make())
--- wrapped
def w(g):
    @functools.wraps(g)
    def inner(x): return g(x)
    return inner
@w
def f(x): return make()
--- no_grad
@torch.no_grad()
def f(x): return make()
--- __getitems__
class C:
    def __getitems__(self, ids): return make()
f = C()
--- random_noise
def f(x):
    from skimage.util import random_noise
    return random_noise(x)
--- randn
cv2 = types.ModuleType('cv2')
def f(x): return cv2.randn(x, 0, 1)
"""

STEADY = r"""
--- named alike
class C:
    random_state = 0
    def random_crop(self, x): return x
    def __call__(self, x): return self.random_crop(x, self.random_state)
f = C()
--- a flag
class C:
    def __init__(self): self.shuffle = self.random = False
    def __getitem__(self, i): return i if self.shuffle or self.random else -i
f = C()
--- a flag of args
args = types.SimpleNamespace(shuffle=False, choice=1)
def f(x): return x if args.shuffle else args.choice
--- a parameter
def g(x, random_state=0): return x
def f(x, shuffle=False): return g(x, random_state=0)
--- a function of that name
def shuffle(x): return x[::-1]
def f(x): return shuffle(x)
--- in __init__
class C:
    def __init__(self): self.order = np.random.permutation(9)
    def __getitem__(self, i): return self.order[i]
f = C()
--- in __init__, called by super
class B:
    def __call__(self, x): return x
class C(B):
    def __init__(self): self.w = random.random()
    def __call__(self, x): return super().__call__(x)
f = C()
--- not called
class C:
    def fresh(self): return random.random()
    def __call__(self, x): return x
f = C()
--- not named
class C:
    def __init__(self): self.rng = make()
    def __call__(self, x): return x
f = C()
--- unused
RNG = make()
def f(x): return np.clip(x, 0, 1)
--- annotated
def f(x, rng: np.random.Generator | None = None): return x
--- a clock
def f(x):
    import os, time
    return x, time.time(), os.getpid(), id(x)
--- a lock and a log
import logging
L = threading.Lock()
log = logging.getLogger('x')
def f(x):
    with L: log.info('x')
    return x
"""


def sources(text: str) -> Any:
    """The sources in `text`, by the first line of each."""
    parts = text.strip().removeprefix("--- ").split("\n--- ")
    return pytest.mark.parametrize(
        "source", ["# " + part for part in parts], ids=[part.split("\n")[0] for part in parts]
    )


EXPRESSIONS = [
    "x + np.random.default_rng().normal()",
    "x + np.random.rand()",
    "x + torch.rand(())",
    "x.clone().normal_()",
    "x + random.random()",
    "x.effect_spread(3)",
]
OTHER_EXPRESSIONS = [
    "torch.nn.functional.interpolate(x, 3).numpy().copy()",
    "len(sys.modules)",
    "threading.current_thread().name",
    "x.replace('random', 'shuffle')",
]


def define(source: str) -> Any:
    module: dict[str, Any] = {"__name__": "users_module"}
    exec(compile(HEAD + source, "users.py", "exec"), module)
    return module["f"]


@sources(RANDOM)
def test_a_source_is_found(source: str) -> None:
    assert random_name(define(source)) is not None


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_is_found(expression: str) -> None:
    assert random_name(define(f"def f(x): return {expression}")) is not None


@pytest.mark.parametrize("expression", OTHER_EXPRESSIONS)
def test_another_expression_is_not(expression: str) -> None:
    assert random_name(define(f"def f(x): return {expression}")) is None


@sources(STEADY)
def test_nothing_is_found(source: str) -> None:
    assert random_name(define(source)) is None


WHERE = """
--- np.random.default_rng in Flip.__call__
class Flip:
    def __call__(self, x): return np.random.default_rng()
f = Flip()
--- R in Flip.__call__
R = make()
class Flip:
    def __call__(self, x): return R.normal()
f = Flip()
--- g in Flip.__call__
class Flip:
    def __init__(self): self.g = make()
    def __call__(self, x): return self.g.normal()
f = Flip()
--- random_ in helper
def helper(x): return x.random_()
def f(x): return helper(x)
"""


@sources(WHERE)
def test_it_says_where(source: str) -> None:
    assert f"# {random_name(define(source))}" == source.partition("\n")[0]


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
