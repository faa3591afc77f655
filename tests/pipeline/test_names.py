"""The scan of names finds every source of randomness that user code names, and little else."""

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
--- default_rng
def f(x): return x + np.random.default_rng().normal()
--- in place
def f(x): return x.clone().normal_()
--- Random
class R:
    def __call__(self, x): return random.Random().sample(x, 1)
f = R()
--- uuid4
def f(x):
    from uuid import uuid4 as u
    return u()
--- RNG
RNG = make()
def f(x): return RNG.normal()
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
--- module
class M(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.r = make()
    def forward(self, x): return self.r.normal()
f = M()
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
--- other functions
def f(x): return torch.nn.functional.interpolate(x, 3).numpy().copy(), len(sys.modules), threading.current_thread().name
--- named alike
class C:
    random_state = 0
    def random_crop(self, x): return x
    def __call__(self, x): return self.random_crop(x, self.random_state)
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
--- overridden
class B:
    def __call__(self, x): return random.random()
class C(B):
    def __call__(self, x): return x
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
def test_a_source_is_found(title: str, source: str) -> None:
    assert name_in(source) is not None


@sources(STEADY)
def test_nothing_is_found(title: str, source: str) -> None:
    assert name_in(source) is None


@sources(WHERE)
def test_it_says_where(title: str, source: str) -> None:
    assert name_in(source) == title


PROJECT = """
import numpy as np
RNG = np.random.default_rng(1)
class Flip:
    def __call__(self, x): return helper(x)
def helper(x): return x * RNG.normal()
def scale(x): return x * 2
"""


def test_an_installed_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in site-packages is the user's, unless it is a known library."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    project = __import__("installed")
    monkeypatch.delitem(sys.modules, "installed")
    monkeypatch.setitem(sys.modules, "installed", project)
    assert random_name(project.Flip()) == random_name(lambda x: project.helper(x)) == "RNG in helper"
    assert random_name(lambda x: project.scale(x)) is random_name(project.scale) is None
