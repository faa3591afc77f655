"""The fingerprint changes with code and parameters, and with nothing else."""

from __future__ import annotations

import datetime
import enum
import functools
import pickle
import random
import re
import sys
import textwrap
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stallfree.errors import InputError
from stallfree.pipeline.compose import Compose, OnItem, mark_deterministic, mark_random
from stallfree.pipeline.fingerprint import fingerprint
from warm import Interpreter


def define(source: str, name: str = "transform", **names: Any) -> Any:
    """What `name` is after running `source` as a module of the user's."""
    module = {"__name__": "users_module", **names}
    exec(compile(textwrap.dedent(source), "users.py", "exec"), module)
    return module[name]


class Scale:
    def __init__(self, by: float, offset: Any = None) -> None:
        self.by = by
        self.offset = offset

    def __call__(self, value: Any) -> Any:
        return value * self.by


class Slotted:
    __slots__ = ("__hidden", "by")

    def __init__(self, by: int, hidden: int) -> None:
        self.by = by
        self.__hidden = hidden


@dataclass(frozen=True)
class Settings:
    size: int
    names: tuple[str, ...] = ()


class Mode(enum.Enum):
    NEAR = 0
    FAR = 1


class Point(NamedTuple):
    x: int
    y: int


class Described:
    def __init__(self, text: str) -> None:
        self.text = text
        self.lock = threading.Lock()

    def fingerprint(self) -> str:
        return self.text


class Picky:
    """Its method is another matter: it needs an argument."""

    def __init__(self, by: int) -> None:
        self.by = by

    def fingerprint(self, of: Any) -> str:
        return "always the same"


def power(value: Any, exponent: int = 2, *, base: int = 0) -> Any:
    return value**exponent + base


DIFFERENT = [
    *(np.ma.array([1, 2], mask=[0, 1], fill_value=3), np.ma.array([1, 2], mask=[0, 1], fill_value=4)),
    *(np.array([{"by": 1}]), np.array([{"by": 2}]), np.array([(1, 2)], "i4,i4"), np.array([(1, 2)], "i2,i4")),
    *(
        torch.tensor([1 + 1j]),
        torch.tensor([1 + 1j]).conj(),
        torch.arange(6).reshape(2, 3),
        torch.arange(6).view(3, 2).t(),
    ),
    *({str(n): n for n in range(99)}, {str(n): n for n in reversed(range(99))}, SimpleNamespace(by=1)),
    *(1, 1.0, True, "1", b"1", bytearray(b"1"), None, 0.0, -0.0, float("nan"), 1j, 2**70, (1,), [1], {1}),
    *(frozenset({1}), {1: 1}, {"1": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}, {"b": 2, "a": 1}, OrderedDict(a=1, b=2)),
    *(OrderedDict(b=2, a=1), defaultdict(list), defaultdict(dict), deque([1]), deque([1], maxlen=2), (1, (2, 3))),
    *((1, 2, 3), ("ab", "c"), ("a", "bc"), Mode.NEAR, Mode.FAR, Point(1, 2), Point(2, 1), Path("a/b"), "a/b"),
    *(Settings(1), Settings(2), Settings(1, ("x",)), Scale(2), Scale(3), Scale(2, offset=[1]), Slotted(1, 2)),
    *(Slotted(1, 3), np.zeros(4), np.zeros((2, 2)), np.zeros(4, np.float32), np.array(["a", None], object)),
    *(np.array([Mode.NEAR], object), np.ma.array(np.zeros(4), mask=False)),
    *(np.ma.array(np.zeros(4), mask=[True, False, False, False]), np.zeros(4).view(np.recarray), torch.zeros(4)),
    *(torch.zeros(4, dtype=torch.bfloat16), torch.ones(4), nn.Conv2d(1, 1, 1), nn.Linear(2, 2), np.float32, np.uint8),
    *(np.dtype("f4"), np.dtype("f8"), torch.float32, torch.float16, slice(1), slice(2), range(3), re.compile("a")),
    *(re.compile("b"), datetime.date(2020, 1, 1), np.clip, np.add, np.multiply, len, "a,b".split, "a.b".split),
    *(str.upper, str.lower, power, functools.partial(power, exponent=3), functools.partial(power, exponent=4)),
    *(Scale(2).__call__, Scale(3).__call__, Scale, Slotted, lambda value: value + 1, lambda value: value + 2),
    *(lambda value: value - 1, Described("a"), Described("b"), Picky(1), Picky(2), Compose([Scale(2)])),
    *(Compose([Scale(3)]), Compose([Scale(2), Scale(2)]), OnItem(0, Scale(2)), OnItem(1, Scale(2))),
]


def test_different_things_differ() -> None:
    found: dict[str, Any] = {}
    for thing in DIFFERENT:
        text = fingerprint(thing)
        assert re.fullmatch("[0-9a-f]{32}", text)
        assert text not in found, (thing, found[text])
        found[text] = thing
    assert fingerprint() != fingerprint(None) != fingerprint(None, None)
    assert fingerprint(1, 2) != fingerprint(2, 1)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=10,
)


@given(plain, plain)
@settings(max_examples=30)
def test_plain_values_agree_exactly_when_their_text_does(a: Any, b: Any) -> None:
    def text(value: Any) -> str:
        if isinstance(value, dict):
            return f"{{{[(repr(key), text(item)) for key, item in value.items()]}}}"
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}{[text(item) for item in value]}"
        return repr(value)

    assert (fingerprint(a) == fingerprint(b)) == (text(a) == text(b))


@given(st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), st.integers()), st.randoms())
def test_the_order_of_keys_counts(mapping: dict[Any, int], shuffler: random.Random) -> None:
    """A transform may look at it; that of a set differs between processes, so that none should."""
    items = list(mapping.items())
    shuffler.shuffle(items)
    assert (fingerprint(mapping) == fingerprint(dict(items))) == (list(mapping.items()) == items)
    assert fingerprint(set(mapping)) == fingerprint({key for key, _ in items})


@pytest.mark.libraries
def test_different_steps_of_albumentations_differ() -> None:
    A = pytest.importorskip("albumentations")
    steps = [A.Resize(4, 4), A.Resize(4, 8), A.Compose([A.Resize(4, 4)]), A.Compose([A.Resize(4, 4)], p=0.5)]
    assert len(set(map(fingerprint, steps))) == len(steps)
    assert fingerprint(pickle.loads(pickle.dumps(steps[-1]))) == fingerprint(steps[-1])


def test_equal_parts_count_alike_whether_shared_or_not() -> None:
    shared = [1, 2]
    assert fingerprint([shared, shared]) == fingerprint([[1, 2], [1, 2]])
    array = np.zeros(2)
    assert fingerprint(Scale(1, array), array) == fingerprint(Scale(1, np.zeros(2)), np.zeros(2))


def test_cycles() -> None:
    def ring(value: int) -> Any:
        loop: list[Any] = [value]
        loop.append(loop)
        scale = Scale(value, loop)
        loop.append({scale, "x"})
        return scale

    assert fingerprint(ring(1)) == fingerprint(ring(1)) != fingerprint(ring(2))


class TestCode:
    def change(self, before: str, after: str, **names: Any) -> bool:
        """Whether the fingerprint of `transform` differs between two sources."""
        return fingerprint(define(before, **names)) != fingerprint(define(after, **names))

    def test_place_and_comments_do_not_count(self) -> None:
        assert not self.change(
            "def transform(v):\n    return [x + 1 for x in v]",
            "import os\n\n\n# higher\ndef transform(v):\n    # by one\n    return [x + 1 for x in v]",
        )

    def test_many_functions_that_use_each_other_take_no_time(self) -> None:
        names = [f"f{n}" for n in range(40)]
        source = "\n".join(f"def {name}(v): return {' + '.join(f'{other}(v)' for other in names)}" for name in names)
        assert len(fingerprint(define(source, "f0"))) == 32

    def test_a_name_that_means_a_lock_counts_by_its_type(self) -> None:
        source = "def transform(v):\n    with LOCK: return v"
        assert fingerprint(define(source, LOCK=threading.Lock())) == fingerprint(define(source, LOCK=threading.Lock()))


def test_what_does_not_count() -> None:
    def with_rng(seed: int) -> Scale:
        rngs = [np.random.default_rng(seed), np.random.RandomState(seed), random.Random(seed), torch.Generator()]
        rngs[3].manual_seed(seed)
        return Scale(1, rngs)

    assert fingerprint(with_rng(1)) == fingerprint(with_rng(2))
    assert fingerprint(Compose([Compose([Scale(1)]), power])) == fingerprint(Compose([Scale(1), power]))


@pytest.mark.parametrize(
    "source",
    [
        "def transform(v): return v",
        "class transform:\n    def __call__(self, v): return v",
        "class T:\n    def __call__(self, v): return v\ntransform = T()",
        "class T:\n    def __getitem__(self, v): return v\ntransform = T()",
        "class T:\n    __slots__ = ()\n    def __call__(self, v): return v\ntransform = T()",
        "class T:\n    def f(self, v): return v\ntransform = T().f",
        "import functools\ndef f(v, by): return v\ntransform = functools.partial(f, by=1)",
        "import functools\n@functools.lru_cache\ndef transform(v): return v",
        "import torch\ntransform = torch.nn.Identity()",
    ],
)
def test_a_mark_counts(source: str) -> None:
    found = [fingerprint(mark(define(source))) for mark in (lambda thing: thing, mark_random, mark_deterministic)]
    assert len(set(found)) == 3


def test_a_trip_through_pickle_does_not_change_it() -> None:
    kept = 0
    for thing in DIFFERENT:
        try:
            sent = pickle.dumps(thing)
        except (pickle.PicklingError, TypeError, AttributeError):  # lambdas and locks do not travel
            continue
        kept += 1
        assert fingerprint(pickle.loads(sent)) == fingerprint(thing), thing
    assert kept > 60


@pytest.mark.libraries
def test_use_does_not_change_it() -> None:
    A = pytest.importorskip("albumentations")
    pipeline = Compose([A.Resize(4, 4, p=1), A.Compose([A.Normalize(p=1), A.HorizontalFlip()], seed=1)])
    before = fingerprint(pipeline)
    pipeline(np.zeros((8, 8, 3), np.uint8))
    assert fingerprint(pipeline) == before


@pytest.mark.libraries
def test_monai() -> None:
    M = pytest.importorskip("monai.transforms")

    def make(size: int) -> Any:
        return M.Compose([M.LoadImaged("image"), M.Resized("image", (size, size)), M.RandFlipd("image")])

    assert fingerprint(make(4)) == fingerprint(make(4)) != fingerprint(make(8))


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (threading.Lock(), "lock"),
        (Scale(1, threading.Lock()), "lock"),
        ({"a": [sys.stdout.buffer]}, "BufferedWriter|FileIO|BytesIO"),
        ((n for n in range(3)), "generator"),
        (torch.eye(2).to_sparse(), "Tensor"),
    ],
)
def test_what_has_no_state_is_named(thing: Any, name: str) -> None:
    with pytest.raises(InputError, match=name) as caught:
        fingerprint(thing)
    assert "fingerprint()" in str(caught.value)


def test_too_deep_is_an_error() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InputError, match="too deeply"):
        fingerprint(deep)


PROGRAM = """
import enum, functools, sys
import numpy as np, torch
from dataclasses import dataclass, field
import stallfree as sf

WORDS = {"cat", "dog", "cow", "hen"}

@dataclass
class Options:
    names: set = field(default_factory=lambda: set(WORDS))
    table: dict = field(default_factory=lambda: {word: len(word) for word in sorted(WORDS)})

class Mode(enum.Enum):
    A = frozenset(WORDS)

class Step:
    kinds = frozenset(WORDS)
    def __init__(self):
        self.options, self.mode, self.rng = Options(), Mode.A, np.random.default_rng()
    def __call__(self, value):
        return value if value in {"x", "y", "z"} else helper(value)

def helper(value, among=frozenset(WORDS)):
    return value in among and value in WORDS

pipeline = sf.Compose([Step(), functools.partial(helper, among=WORDS), sf.OnItem("image", Step()),
                      lambda v: [helper(x) for x in v], torch.nn.Identity(), np.ascontiguousarray])
"""


BOTH = """
import sys
sys.path.insert(0, FOLDER)
import program
exec(program.__loader__.get_source("program"))
from stallfree.pipeline.fingerprint import fingerprint
print(hash("a string"), fingerprint(pipeline), fingerprint(program.pipeline))
"""


def check_programs(folder: Path, programs: list[str], runs: list[Callable[[str], str]]) -> None:
    """All fingerprints of programs at different places are one, although strings have different hashes."""
    hashes, prints = [], set()
    for number, (program, run) in enumerate(zip(programs, runs, strict=True)):
        place = folder / str(number)
        place.mkdir()
        (place / "program.py").write_text(program)
        hashed, *found = run(BOTH.replace("FOLDER", repr(str(place)))).split()
        hashes.append(hashed)
        prints |= set(found)
    assert len(set(hashes)) == len(hashes)
    assert len(prints) == 1


def test_the_same_in_every_process(
    tmp_path: Path, interpreter: Interpreter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the hash seed, the folder, the place in the file, and whether it is a script or a module."""

    def there(code: str) -> str:
        done = interpreter.run(code)
        assert done.code == 0, done.err
        return done.out

    def here(code: str) -> str:
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.delitem(sys.modules, "program", raising=False)
        main = type(sys)("__main__")
        monkeypatch.setitem(sys.modules, "__main__", main)
        exec(compile(code, "here", "exec", dont_inherit=True), main.__dict__)
        del sys.modules["program"]
        return capsys.readouterr().out

    check_programs(tmp_path, [PROGRAM, "\n\n# further down\n" + PROGRAM], [there, here])


def test_a_file_system_of_ones_own_is_the_same_in_every_process() -> None:
    class Drive(LocalFileSystem):  # type: ignore[misc]
        rate = 10

    before = fingerprint(Drive)
    made = fingerprint(Drive())
    Drive._pid = 1
    Drive(skip_instance_cache=True)
    assert fingerprint(Drive) == before
    assert fingerprint(Drive()) == made
    Drive.rate = 20
    assert fingerprint(Drive) != before
