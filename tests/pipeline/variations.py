"""Transforms in two variations each: `<1|2>` in the source is one of two texts, which changes what the transform does.

`# file: name.py` begins another file of the same project; `P` in names of modules is the number of the project.
"""

TEXT = r"""
def transform(v): return v + <1|2>
---
def transform(v): return v <+|-> 1
---
def transform(v): return v.<min|max>()
---
def transform(v, by=<1|2>): return v * by
---
def transform(v, *, by=<1|2>): return v * by
---
def transform(v): return [x + <1|2> for x in v]
---
def transform(v): return v in {1, <2|3>}
---
transform = lambda v: v + <1|2>
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
def make(by):
    return lambda v: v * by
transform = make(<1|2>)
---
def make(f):
    return lambda v: f(v)
transform = make(lambda v: v + <1|2>)
---
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != <0|1> and even(n - 1)
transform = even
---
BY = <1|2>
def transform(v): return v * BY
---
BY = <1|1.0>
def transform(v): return v * BY
---
def f(): return <1|2>
def transform(v): return v * f()
---
f = lambda: <1|2>
def transform(v): return [f() for x in v]
---
OF = {'by': <1|2>}
def transform(v): return v * OF['by']
---
OF = {'by': [0, (<1|2>,)]}
def transform(v): return v * OF['by'][1][0]
---
OF = {<'a': 1, 'b': 2|'b': 2, 'a': 1>}
def transform(v): return list(OF)[v]
---
OF = {<1: 1, 2: 2|2: 2, 1: 1>}
def transform(v): return list(OF)[v]
---
OF = [{<'a': 1, 'b': 2|'b': 2, 'a': 1>}] * 2
def transform(v): return list(OF[0])[v]
---
OF = {str(n): n for n in <range(999)|reversed(range(999))>}
def transform(v): return list(OF)[v]
---
OPS = {'f': lambda v: v + <1|2>}
def transform(v): return OPS['f'](v)
---
OPS = [lambda v: v + <1|2>]
def transform(v): return OPS[0](v)
---
def f(v): return v
f.by = <1|2>
def transform(v): return v * f.by
---
import types
OF = types.SimpleNamespace(by=<1|2>)
def transform(v): return v * OF.by
---
import argparse
args = argparse.Namespace(by=<1|2>)
def transform(v): return v * args.by
---
import argparse, os
args = argparse.Namespace(log=open(os.devnull), by=<1|2>)
args.log.close()
def transform(v): return v * args.by
---
import dataclasses
@dataclasses.dataclass
class Of:
    by: int = <1|2>
OF = Of()
def transform(v): return v * OF.by
---
import enum
class Of(enum.Enum): BY = <1|2>
def transform(v): return v * Of.BY.value
---
import enum
class Of(enum.Enum):
    A = 1
    def by(self): return <1|2>
OF = Of.A
def transform(v): return v * OF.by()
---
import typing
class Of(typing.NamedTuple): by: int
OF = Of(<1|2>)
def transform(v): return v * OF.by
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
def f(v, by): return v * by
f = functools.partial(f, by=<1|2>)
def transform(v): return f(v)
---
import functools
@functools.lru_cache
def f(): return <1|2>
def transform(v): return v * f()
---
import functools
@functools.wraps(len)
def transform(v): return v * <1|2>
---
import functools
def twice(f):
    @functools.wraps(f)
    def inner(v): return f(f(v))
    return inner
@twice
def transform(v): return v * <2|3>
---
import functools
@functools.singledispatch
def transform(v): return v
@transform.register
def _(v: int): return v * <1|2>
---
import re
OF = re.compile('<a|b>')
def transform(v): return OF.sub('', v)
---
OF = slice(<1|2>)
def transform(v): return v[OF]
---
import weakref
class Of: pass
of = Of()
of.by = <1|2>
REF = weakref.ref(of)
def transform(v): return v * REF().by
---
class T:
    def __call__(self, v): return v + <1|2>
transform = T()
---
class T:
    def f(self): return <1|2>
    def __call__(self, v): return v + self.f()
transform = T()
---
class T:
    BY = <1|2>
    def __call__(self, v): return v * self.BY
transform = T()
---
class T:
    def __init__(self): self.by = <1|2>
    def __call__(self, v): return v * self.by
transform = T()
---
class T:
    __slots__ = ('by',)
    def __call__(self, v): return v * self.by
transform = T()
transform.by = <1|2>
---
class T:
    @staticmethod
    def f(): return <1|2>
    def __call__(self, v): return v * self.f()
transform = T()
---
class T:
    @classmethod
    def f(cls): return <1|2>
    def __call__(self, v): return v * self.f()
transform = T()
---
class T:
    @property
    def f(self): return <1|2>
    def __call__(self, v): return v * self.f
transform = T()
---
import functools
class T:
    @functools.cached_property
    def f(self): return <1|2>
    def __call__(self, v): return v * self.f
transform = T()
---
import functools
class T:
    def f(self, by): return by
    g = functools.partialmethod(f, <1|2>)
    def __call__(self, v): return v * self.g()
transform = T()
---
class D:
    def __get__(self, *_): return <1|2>
class T:
    f = D()
    def __call__(self, v): return v * self.f
transform = T()
---
class T:
    def __getattr__(self, name): return <1|2>
    def __call__(self, v): return v * self.f
transform = T()
---
class B:
    def f(self): return <1|2>
class T(B):
    def __call__(self, v): return v * self.f()
transform = T()
---
class B:
    BY = <1|2>
class T(B):
    def __call__(self, v): return v * self.BY
transform = T()
---
class M(type):
    by = <1|2>
class T(metaclass=M):
    def __call__(self, v): return v * type(self).by
transform = T()
---
class T:
    def f(self, v): return v * <1|2>
transform = T().f
---
class T:
    def __init__(self, by): self.by = by
    def f(self, v): return v * self.by
transform = T(<1|2>).f
---
class Of:
    BY = <1|2>
def transform(v): return v * Of.BY
---
class Of:
    @staticmethod
    def f(): return <1|2>
def transform(v): return v * Of.f()
---
class Of:
    def __init__(self): self.by = <1|2>
def transform(v): return v * Of().by
---
class Of:
    def f(self, v): return v * <1|2>
f = Of().f
def transform(v): return f(v)
---
import torch
class T(torch.nn.Module):
    def forward(self, v): return v * <1|2>
transform = T()
---
import torch
transform = torch.nn.Linear(2, 2)
torch.nn.init.constant_(transform.weight, <1|2>)
torch.nn.init.zeros_(transform.bias)
---
class L(list): pass
OF = L([1])
OF.by = <1|2>
def transform(v): return v * OF.by
---
class L(dict): pass
OF = L(a=1)
OF.by = <1|2>
def transform(v): return v * OF.by
---
class L(str): pass
OF = L('a')
OF.by = <1|2>
def transform(v): return v * OF.by
---
class L(list):
    def by(self): return <1|2>
OF = L([1])
def transform(v): return v * OF.by()
---
import collections
OF = collections.defaultdict(lambda: <1|2>)
def transform(v): return OF[v]
---
import collections
OF = collections.OrderedDict(<a=1, b=2|b=2, a=1>)
def transform(v): return list(OF)[v]
---
import collections
OF = collections.deque([1], maxlen=<1|2>)
def transform(v): return OF.maxlen
---
import numpy as np
OF = np.array([<1|2>])
def transform(v): return v * OF
---
import numpy as np
OF = np.array([1], <'i4'|'u4'>)
def transform(v): return v * OF
---
import numpy as np
OF = np.arange(6).reshape(2, 3)<|[::-1]>
def transform(v): return v * OF
---
import numpy as np
OF = np.array([(1, 2)], '<i4,i4|i2,i4>')
def transform(v): return OF['f0']
---
import numpy as np
OF = np.array([{'by': <1|2>}])
def transform(v): return v * OF[0]['by']
---
import numpy as np
OF = np.ma.array([1, 2], mask=[<0|1>, 0])
def transform(v): return OF.sum()
---
import numpy as np
OF = np.ma.array([1, 2], mask=[0, 1], fill_value=<3|4>)
def transform(v): return OF.filled()
---
import numpy as np
class A(np.ndarray): pass
OF = np.ones(2).view(A)
OF.by = <1|2>
def transform(v): return v * OF.by
---
import numpy as np
transform = np.vectorize(lambda v: v + <1|2>)
---
import torch
OF = torch.tensor([<1|2>])
def transform(v): return v * OF
---
import torch
OF = torch.tensor([<1|2>], dtype=torch.bfloat16).expand(3)
def transform(v): return v * OF
---
import torch
OF = torch.arange(6).reshape(2, 3)<.t().t()|.flip(0).t().t()>
def transform(v): return v * OF
---
import torch
OF = torch.tensor([1 + <1|2>j]).conj()
def transform(v): return v * OF
---
import toolsP
def transform(v): return v * toolsP.BY
# file: toolsP.py
BY = <1|2>
---
from toolsP import BY
def transform(v): return v * BY
# file: toolsP.py
BY = <1|2>
---
from toolsP import *
def transform(v): return v * BY
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
def transform(v): return pkgP.sub.f(v)
# file: pkgP/sub.py
def f(v): return v * <1|2>
---
import pkgP.sub
def transform(v): return v * pkgP.sub.BY
# file: pkgP/sub.py
BY = <1|2>
---
import pkgP.sub as s
def transform(v): return v * s.BY
# file: pkgP/sub.py
BY = <1|2>
---
from pkgP import sub
def transform(v): return v * sub.BY
# file: pkgP/sub.py
BY = <1|2>
---
import pkgP.a.b
def transform(v): return v * pkgP.a.b.BY
# file: pkgP/a/b.py
BY = <1|2>
---
import pkgP.sub
def transform(v): return v * pkgP.sub.OF.by
# file: pkgP/sub.py
class Of: pass
OF = Of()
OF.by = <1|2>
---
import pkgP.sub
def transform(v): return pkgP.sub.OF.f(v)
# file: pkgP/sub.py
class OF:
    @staticmethod
    def f(v): return v * <1|2>
---
import pkgP.sub
def transform(v): return v * pkgP.sub.OF['by']
# file: pkgP/sub.py
OF = dict(by=<1|2>)
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
    from toolsP import f
    return f(v)
# file: toolsP.py
def f(v): return v * <1|2>
---
import toolsP
def transform(v):
    from toolsP import f as g
    return g(v)
# file: toolsP.py
def f(v): return v * <1|2>
---
def transform(v):
    import pkgP.sub
    return v * pkgP.sub.BY
# file: pkgP/sub.py
BY = <1|2>
---
import pkgP.sub
def transform(v):
    import pkgP.sub
    return v * pkgP.sub.BY
# file: pkgP/sub.py
BY = <1|2>
---
def transform(v):
    import pkgP.sub as s
    return v * s.BY
# file: pkgP/sub.py
BY = <1|2>
---
def transform(v):
    from pkgP import sub
    return v * sub.BY
# file: pkgP/sub.py
BY = <1|2>
---
class T:
    def __call__(self, v):
        from pkgP.sub import BY
        return v * BY
transform = T()
# file: pkgP/sub.py
BY = <1|2>
---
def transform(v):
    def inner():
        from pkgP.sub import BY
        return BY
    return v * inner()
# file: pkgP/sub.py
BY = <1|2>
---
from pkgP.it import f as transform
# file: pkgP/__init__.py
# file: pkgP/it.py
def f(v):
    from .sub import BY
    return v * BY
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
"""

SOURCES = TEXT.strip().split("\n---\n")
