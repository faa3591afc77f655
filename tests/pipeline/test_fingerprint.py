"""The fingerprint changes with code and parameters, and with nothing else. Variations of code are in another file."""

import datetime
import enum
import functools
import multiprocessing
import os
import pickle
import random
import re
import resource
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import ConcatDataset

from stallfree import Compose, DecodeImage, FileDataset, InputError, OnItem, mark_deterministic, mark_random
from stallfree.ipc.process import call_in_child
from stallfree.pipeline.fingerprint import fingerprint, same, tolerant
from stallfree.pipeline.objects import generators_of, random_name


class Scale:
    def __init__(self, by: float, offset: Any = None) -> None:
        self.by, self.offset = by, offset

    def __call__(self, value: Any) -> Any:
        return value * self.by


class Slotted:
    __slots__ = ("__hidden", "by")

    def __init__(self, by: int, hidden: int) -> None:
        self.by, self.__hidden = by, hidden


@dataclass(frozen=True)
class Settings:
    size: Any
    names: Any = ()


class Mode(enum.Enum):
    NEAR = 0
    FAR = 1


class Point(NamedTuple):
    x: Any
    y: int


class Picky(Scale):
    """Its method is another matter: it needs an argument."""

    def fingerprint(self, of: Any) -> str:
        return "always the same"


class Source:
    """States its records in `fingerprint()`, and not its pipeline."""

    def __init__(self, records: str, *steps: Any) -> None:
        self.records, self.pipeline, self.lock = records, Compose(steps), threading.Lock()

    def __len__(self) -> int:
        return 3

    def fingerprint(self) -> str:
        return self.records


def power(value: Any, exponent: int = 2, *, base: int = 0) -> Any:
    return value**exponent + base


DIFFERENT = [
    *(np.ma.array([1, 2], mask=[0, 1], fill_value=3), np.ma.array([1, 2], mask=[0, 1], fill_value=4)),
    *(np.array([{"by": 1}]), np.array([{"by": 2}]), np.array([(1, 2)], "i4,i4"), np.array([(1, 2)], "i2,i4")),
    *(np.ma.masked, torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()),
    *(torch.tensor([1j]), torch.tensor([1j]).conj(), torch.arange(6).view(2, 3), torch.arange(6).view(3, 2).t()),
    *({str(n): n for n in range(99)}, {str(n): n for n in reversed(range(99))}, SimpleNamespace(by=1)),
    *(1, 1.0, True, "1", b"1", bytearray(b"1"), None, 0.0, -0.0, float("nan"), 1j, 2**70, (1,), [1], {1}),
    *(frozenset({1}), {1: 1}, {"1": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}, {"b": 2, "a": 1}, OrderedDict(a=1, b=2)),
    *(OrderedDict(b=2, a=1), defaultdict(list), defaultdict(dict), deque([1]), deque([1], maxlen=2), (1, (2, 3))),
    *(1 << 20000, "\ud800", [1, 2], [1.0, 2.0], [True, 2], [(1, 2), 3], [[1, 2], 3], [1, [2, 3]]),
    *(["12", "3"], ["1", "23"]),
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
    *(lambda value: value - 1, Source("a"), Source("b"), Picky(1), Picky(2), Compose([Scale(2)])),
    *(Compose([Scale(3)]), Compose([Scale(2), Scale(2)]), OnItem(0, Scale(2)), OnItem(1, Scale(2))),
    *(ConcatDataset([Source("a")]), ConcatDataset([Source("b")]), ConcatDataset([Source("a", len)])),  # type: ignore[list-item]
    *(ConcatDataset([Source("a", len), Source("a")]), ConcatDataset([Source("a"), Source("a", len)])),  # type: ignore[list-item]
]


class Hiding:
    def __init__(self, hidden: Any, way: str) -> None:
        self.name, self.hidden, self.way, self.lock = "a", hidden, way, threading.Lock()

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {"arguments": (), "state": ({"name": self.name},), "no state": (None,)}[self.way]
        return Hiding, (None, self.way), *state


@pytest.mark.parametrize("way", ["arguments", "state", "no state"])
def test_attributes_that_are_not_pickled_count(way: str) -> None:
    table = {"a": [1, 2]}
    assert fingerprint(Hiding(table, way)) == fingerprint(Hiding({"a": [1, 2]}, way))
    assert fingerprint(Hiding(table, way)) != fingerprint(Hiding({"a": [1, 3]}, way))
    looped = Hiding(table, way)
    looped.hidden = looped
    assert fingerprint(looped) != fingerprint(Hiding(table, way))


PADDED = np.dtype({"names": ["x", "y"], "formats": ["u1", "<f4"], "offsets": [0, 8], "itemsize": 16})


@pytest.mark.parametrize("kind", [PADDED, [("a", PADDED, 2), ("b", "f4")], "g", ">g", "G", [("x", "u1"), ("y", "g")]])
def test_bytes_without_a_value_do_not_count(kind: Any) -> None:
    one = np.ones(2, kind)
    for index in range(one.nbytes):
        other = one.copy()
        other.view(np.uint8)[index] ^= 1
        assert same(one, other) == np.array_equal(one, other)


def test_different_things_differ() -> None:
    found: dict[str, Any] = {}
    for thing in DIFFERENT:
        text = fingerprint(thing)
        assert re.fullmatch("[0-9a-f]{32}", text)
        assert text not in found, (thing, found[text])
        found[text] = thing
    assert fingerprint() != fingerprint(None) != fingerprint(None, None)
    assert fingerprint(1, 2) != fingerprint(2, 1)


class Wrapping(Scale):
    def __init__(self, by: int) -> None:
        super().__init__(by)
        functools.update_wrapper(self, fingerprint)


class Changing(Slotted):
    """Pickles decide nothing: one attribute is None in them, one is left out."""

    def __init__(self, by: int, hidden: int) -> None:
        super().__init__(by, hidden)
        self.table = hidden

    def __getstate__(self) -> Any:
        return {"table": None, "by": 0}


class Named(Scale):
    def __reduce__(self) -> str:
        return "NAMED"


def executed(text: str, **names: Any) -> Any:
    exec(f"step = {text}", names)
    return names["step"]


def module_with(name: str = "settings_of_a_job", **values: Any) -> Any:
    module = ModuleType(name)
    vars(module).update(values)
    return module


class Numbers(set[Any]):
    """Has attributes, and an order of its own in each process."""


def subclass(base: Any, by: int) -> Any:
    class Own(base):  # type: ignore[misc]
        def fetch(self, id: int) -> Any:
            return super().fetch(id) * by

        def __call__(self, value: Any) -> Any:
            return value * by

    return Own


PAIRS: dict[str, Callable[[int], Any]] = {
    "a wrapper": Wrapping, "an attribute that a pickle changes": lambda by: Changing(1, by),
    "a slot that a pickle leaves out": lambda by: Changing(by, 1),
    "executed code": lambda by: executed(f"lambda x: x * {by}"), "a module": lambda by: module_with(by=by),
    "globals of executed code": lambda by: executed("lambda x: x * BY", BY=by),
    "a function in a module": lambda by: module_with(step=executed(f"lambda x: {by}")),
    "a class that inherits a fingerprint": lambda by: subclass(DecodeImage, by)(),
    "a source that does": lambda by: subclass(FileDataset, by)([__file__]).fingerprint(),
}  # fmt: skip


@pytest.mark.parametrize("kind", PAIRS)
def test_what_tells_two_of_a_kind_apart(kind: str) -> None:
    one, again, other = (fingerprint(PAIRS[kind](by)) for by in (2, 2, 3))
    assert one == again != other


@pytest.mark.parametrize("thing", [Named(2), np.frompyfunc(abs, 1, 1), lambda: SHARED.value], ids=[*"abc"])
def test_what_is_not_known_is_not_taken_for_equal(thing: Any) -> None:
    with pytest.raises(InputError, match="cannot be fingerprinted"):
        fingerprint(thing)


SHARED = multiprocessing.Value("i", 3)


def test_sets_of_a_class_of_ones_own_count_alike_in_every_process() -> None:
    command = [sys.executable, "-c", "from test_fingerprint import *; print(fingerprint(Numbers('abcdefgh')))"]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = [subprocess.check_output(command, env=os.environ | paths | {"PYTHONHASHSEED": str(n)}) for n in range(2)]
    assert found[0] == found[1]


def test_a_package_of_the_user_that_is_called_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that of Hugging Face is a library."""
    monkeypatch.setitem(sys.modules, "datasets", package := module_with("datasets"))
    steps = [executed("lambda x: x * BY", BY=by, __name__="datasets.steps") for by in (2, 3)]
    assert len({*map(fingerprint, steps)}) == 2
    assert random_name(executed("lambda x: random()", __name__="datasets.steps"))
    package.__version__ = "4.0"
    assert not random_name(executed("lambda x: random()", __name__="datasets.steps"))


def test_generators_behind_many_annotations_are_found() -> None:
    box: dict[str, Any] = {
        "segmentation": [[1.0] * 12, [2.0] * 12],
        "keypoints": [0] * 51,
        "bbox": [1.0, 2.0, 3.0, 4.0],
    }
    data = SimpleNamespace(annotations=[dict(box) for _ in range(6000)], transform=[Scale(1, np.random.default_rng(0))])
    assert generators_of(data) == [data.transform[0].offset]


def test_a_trip_through_pickle_does_not_change_it() -> None:
    kept = 0
    for thing in DIFFERENT:
        try:
            sent = pickle.dumps(thing)
        except (pickle.PicklingError, TypeError, AttributeError):  # lambdas and locks do not travel
            continue
        kept += 1
        assert fingerprint(pickle.loads(sent)) == fingerprint(thing), thing
    assert kept > 80


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner) | st.tuples(inner, inner),
    max_leaves=5,
)


@given(plain, plain)
@settings(max_examples=30)
def test_plain_values_agree_exactly_when_their_text_does(a: Any, b: Any) -> None:
    assert (fingerprint(a) == fingerprint(b)) == (repr(a) == repr(b))
    assert fingerprint(pickle.loads(pickle.dumps(a))) == fingerprint(a)


@given(st.dictionaries(st.integers() | st.tuples(st.integers()), st.integers()), st.randoms())
@settings(max_examples=30)
def test_the_order_of_keys_counts(mapping: dict[Any, int], shuffler: random.Random) -> None:
    """A transform may look at it; that of a set differs between processes, so that none should."""
    items = list(mapping.items())
    shuffler.shuffle(items)
    assert (fingerprint(mapping) == fingerprint(dict(items))) == (list(mapping.items()) == items)
    assert fingerprint(set(mapping)) == fingerprint({key for key, _ in items})


def test_equal_parts_count_alike_whether_shared_or_not() -> None:
    shared, array = [1, 2], np.zeros(2)
    assert fingerprint([shared, shared]) == fingerprint([[1, 2], [1, 2]])
    assert fingerprint(Scale(1, array), array) == fingerprint(Scale(1, np.zeros(2)), np.zeros(2))


def test_cycles() -> None:
    def ring(value: int) -> Any:
        scale = Scale(value, [value])
        scale.offset += [scale, {scale, "x"}]
        return scale

    assert fingerprint(ring(1)) == fingerprint(ring(1)) != fingerprint(ring(2))


def define(source: str, **names: Any) -> Any:
    """`transform` after `source` has run as a module of the user's."""
    module = {"__name__": "users_module", **names}
    exec(compile(source, "users.py", "exec"), module)
    return module["transform"]


def test_what_does_not_count() -> None:
    kinds: list[Any] = [np.random.default_rng, np.random.RandomState, random.Random, torch.Generator().manual_seed]
    assert len({fingerprint(Scale(1, [kind(seed) for kind in kinds])) for seed in (1, 2)}) == 1
    assert fingerprint(Compose([Compose([Scale(1)]), power])) == fingerprint(Compose([Scale(1), power]))
    lower = "import os\n\n\n# higher\ndef transform(v):\n    # by one\n    return [x + 1 for x in v]"
    assert fingerprint(define("def transform(v):\n    return [x + 1 for x in v]")) == fingerprint(define(lower))
    locks = [define("def transform(v):\n    with LOCK: return v", LOCK=threading.Lock()) for _ in range(2)]
    assert fingerprint(locks[0]) == fingerprint(locks[1])


def test_many_functions_that_use_each_other_take_no_time() -> None:
    names = [f"f{n}" for n in range(40)]
    source = "\n".join(f"def {name}(v): return {' + '.join(f'{other}(v)' for other in names)}" for name in names)
    assert len(fingerprint(define(f"{source}\ntransform = f0"))) == 32


@pytest.mark.parametrize(
    "source",
    [
        "def transform(v): return v",
        "class transform:\n    def __call__(self, v): return v",
        "class T:\n    def __call__(self, v): return v\ntransform = T()",
        "class T:\n    def __getitem__(self, v): return v\ntransform = T()",
        "import functools\ndef f(v, by): return v\ntransform = functools.partial(f, by=1)",
        "import functools\n@functools.lru_cache\ndef transform(v): return v",
        "import torch\ntransform = torch.nn.Identity()",
    ],
)
def test_a_mark_counts(source: str) -> None:
    found = [fingerprint(mark(define(source))) for mark in (lambda thing: thing, mark_random, mark_deterministic)]
    assert len(set(found)) == 3


@pytest.mark.libraries
def test_steps_of_libraries() -> None:
    A, M = pytest.importorskip("albumentations"), pytest.importorskip("monai.transforms")
    flips = A.Compose([A.Normalize(p=1), A.HorizontalFlip()], p=0.5, seed=1)
    volumes = [M.Compose([M.Resized("image", (size, size)), M.RandFlipd("image")]) for size in (4, 8)]
    steps = [A.Resize(4, 4, p=1), A.Resize(4, 8, p=1), A.Compose([A.Resize(4, 4)]), flips, *volumes]
    before = [*map(fingerprint, steps)]
    assert len(set(before)) == len(steps)
    Compose(steps[2:4])(np.zeros((8, 8, 3), np.uint8))  # use does not change it
    assert [*map(fingerprint, pickle.loads(pickle.dumps(steps)))] == before


itself: list[Any] = []
itself.append(itself)


@pytest.mark.parametrize(("thing", "name"), [
    (threading.Lock(), "lock"), (Scale(1, threading.Lock()), "lock"), ((n for n in range(3)), "generator"),
    ({"a": [sys.stdout.buffer]}, "BufferedWriter|FileIO|BytesIO"), (torch.empty(2, device="meta"), "Tensor"),
    (functools.reduce(lambda inner, _: [inner], range(5000), []), "list, which is nested too deeply"),  # type: ignore[arg-type, return-value]
    (itself, "list, which .* contains itself"),
])  # fmt: skip
def test_what_has_no_fingerprint_is_named(thing: Any, name: str) -> None:
    with pytest.raises(InputError, match=rf"(?s)({name}).*fingerprint\(\)"):
        fingerprint(thing)
    with tolerant() as unknown:
        assert fingerprint(thing) == fingerprint(thing)
    assert re.search(name, unknown[0])


MANY = range(1000)
MANY_ITEMS: list[Any] = [
    *({str(n): n for n in MANY}, [{"file": str(n), "label": n} for n in MANY], [Point(str(n), n) for n in MANY]),
    *([Settings(str(n), n) for n in MANY], [Path(str(n)) for n in MANY], list(np.arange(len(MANY)))),
    *({str(n) for n in MANY}, np.array([str(n) for n in MANY], object)),
]


@pytest.mark.parametrize("items", MANY_ITEMS, ids=lambda items: type(items).__name__)
def test_many_items_take_no_calls_of_functions_for_each(items: Any) -> None:
    calls = 0

    def count(frame: object, event: str, what: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        found = fingerprint(items)
    finally:
        sys.setprofile(None)
    assert calls < (50 if isinstance(items, list) else 3) * len(MANY)
    assert fingerprint(pickle.loads(pickle.dumps(items))) == found


def test_a_mapped_file_takes_little_memory(tmp_path: Path) -> None:
    """It is represented by its name, time and size, and by a sample of its bytes."""

    def prints() -> list[str]:
        array = np.memmap(tmp_path / "tokens.bin", np.uint16, "r")
        views = [array, array[1:], np.asarray(array)[1:], array.reshape(2, -1), array[::2], {"a": [array]}]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = [*map(fingerprint, views)]
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
        return found

    with open(tmp_path / "tokens.bin", "wb") as file:
        file.truncate(3 << 30)
    first = call_in_child(prints, "fingerprints")
    os.utime(tmp_path / "tokens.bin", (1, 1))
    assert len({*first, *call_in_child(prints, "fingerprints")}) == 12


def test_large_values_take_no_memory() -> None:
    """Such as a view that repeats one number."""
    for view in (lambda value: np.broadcast_to(value, 10**12), lambda value: torch.tensor(value).expand(10**12)):
        assert fingerprint(view(1.0)) == fingerprint(view(1.0)) != fingerprint(view(2.0))
