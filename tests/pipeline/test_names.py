"""The scan of names finds every source of randomness that user code names, and little else."""

from pathlib import Path
from typing import Any

import pytest

from stallfree.pipeline import objects
from stallfree.pipeline.objects import random_name

HEAD = """
import collections, contextvars, enum, functools, random, sys, threading, types, weakref
import numpy as np, torch
def make(): return np.random.default_rng(1)
"""

RANDOM = r"""
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
--- random.Random in R.__call__
class R:
    def __call__(self, x): return random.Random().sample(x, 1)
f = R()
--- uuid.uuid4 in f
def f(x):
    from uuid import uuid4 as u
    return u()
--- R in C.r
R = make()
class C:
    @property
    def r(self): return R
    def __call__(self, x): return self.r.normal()
f = C()
--- r in M.forward
class M(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.r = make()
    def forward(self, x): return self.r.normal()
f = M()
--- np.random.default_rng in make
class C:
    def step(self, x): return make()
    def __call__(self, x): return self.step(x)
f = C()
--- np.random.default_rng in make
class H:
    def read(self, x): return make()
class C:
    def __init__(self): self.h = H()
    def __getitem__(self, x): return self.h.read(x)
f = C()
--- np.random.default_rng in make
class D:
    def __getitem__(self, x): return make()
f = torch.utils.data.Subset(D(), [0])
--- np.random.default_rng in make
class H:
    def __init__(self): self.r = make()
def f(x): return H().r.integers(3)
--- np.random.default_rng in make
@torch.no_grad()
def f(x): return make()
--- np.random.default_rng in make
class C:
    def __getitems__(self, ids): return make()
f = C()
--- random_noise in f
def f(x):
    from skimage.util import random_noise
    return random_noise(x)
--- randn in f
cv2 = types.ModuleType('cv2')
def f(x): return cv2.randn(x, 0, 1)
"""

STEADY = r"""
--- other functions
def f(x): return torch.nn.functional.interpolate(x, 3).numpy().copy(), len(sys.modules), threading.current_thread().name
--- attributes, functions and parameters named alike
args = types.SimpleNamespace(shuffle=False, choice=1)
def permutation(x, random_state=0): return x[::-1]
class C:
    random_state = 0
    def random_crop(self, x): return x
    def __call__(self, x, shuffle=False):
        x = permutation(self.random_crop(x), random_state=self.random_state)
        return x if shuffle or args.shuffle else args.choice
f = C()
--- in __init__ of a base class that is named
class B:
    def __init__(self): self.order = np.random.permutation(9)
    def __getitem__(self, i): return self.order[i]
class C(B):
    def __getitem__(self, i): return B.__getitem__(self, i + 1)
f = C()
--- in __init__ of what it holds
class H:
    def __init__(self): self.w = random.random()
    def read(self, i): return i * self.w
class C:
    def __init__(self): self.h = H()
    def __getitem__(self, i): return self.h.read(i)
f = C()
--- overridden, not called, or not named
class B:
    def __call__(self, x): return random.random()
class C(B):
    def __init__(self): self.rng = make()
    def fresh(self): return random.random()
    def __call__(self, x): return x
f = C()
--- annotated
def f(x, rng: np.random.Generator | None = None): return x
--- a clock, a lock and a log
import logging
L, log = threading.Lock(), logging.getLogger('x')
def f(x):
    import os, time
    with L: log.info('x')
    return x, time.time(), os.getpid(), id(x)
"""


def sources(text: str) -> Any:
    """The title and the source of each part of `text`."""
    parts = [part.partition("\n") for part in text.strip().removeprefix("--- ").split("\n--- ")]
    return pytest.mark.parametrize(
        ("title", "source"), [(title, source) for title, _, source in parts], ids=[title for title, *_ in parts]
    )


def name_in(source: str) -> str | None:
    module: dict[str, Any] = {"__name__": "users_module"}
    exec(compile(HEAD + source, "users.py", "exec"), module)
    return random_name(module["f"])


@sources(RANDOM)
def test_a_source_is_found_and_it_says_where(title: str, source: str) -> None:
    assert name_in(source) == title


@sources(STEADY)
def test_nothing_is_found(title: str, source: str) -> None:
    assert name_in(source) is None


def test_an_installed_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in site-packages is the user's, unless it is a known library."""
    monkeypatch.setattr(objects, "LIBRARIES", objects.LIBRARIES - {"spiced"})
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "support" / "site-packages")
    spiced = __import__("spiced")
    assert random_name(spiced.Taste.grain) == "_numbers.integer in Taste.grain"
    assert random_name(lambda x: spiced.Taste(x).amount()) == "_numbers.fraction in Taste.__init__"
    assert random_name(lambda x: spiced.Frame(x)) is None
