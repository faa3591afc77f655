"""Transforms in two variations each: `<1|2>` in the source is one of two texts, which changes what the transform does.

`# file: name.py` begins another file of the same project; `P` in names of modules is the number of the project.
"""

TEXT = r"""
def transform(v): return v + <1|2>
---
def transform(v, by=<1|2>): return v * by
---
def transform(v, *, by=<1|2>): return v * by
---
def transform(v): return [x + <1|2> for x in v]
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
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != <0|1> and even(n - 1)
transform = even
---
BY = <1|2>
def transform(v): return v * BY
---
def f(): return <1|2>
def transform(v): return v * f()
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
class D:
    def __get__(self, *_): return <1|2>
class T:
    f = D()
    def __call__(self, v): return v * self.f
transform = T()
---
class B:
    def f(self): return <1|2>
class T(B):
    def __call__(self, v): return v * self.f()
transform = T()
---
class M(type):
    by = <1|2>
class T(metaclass=M):
    def __call__(self, v): return v * type(self).by
transform = T()
---
class Of:
    @staticmethod
    def f(): return <1|2>
def transform(v): return v * Of.f()
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
from toolsP import BY
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
from pkgP import sub
def transform(v): return v * sub.BY
# file: pkgP/sub.py
BY = <1|2>
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
    from toolsP import f
    return f(v)
# file: toolsP.py
def f(v): return v * <1|2>
---
def transform(v):
    import pkgP.sub
    return v * pkgP.sub.BY
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
