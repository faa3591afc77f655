"""The codec: what goes in comes out, views keep their buffer alive, and what is not stored is named."""

import contextlib
import gc
import io
import json
import math
import mmap
import os
import pickle
import struct
import sys
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from copy import deepcopy
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from stallfree import CodecError
from stallfree.pipeline import codec
from stallfree.pipeline.codec import encode, read_record, structure_of
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.pipeline.values import BANDS, TORCH_DTYPES, as_cached

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


class Sample(NamedTuple):
    image: Any
    label: Any


class Loose(namedtuple("Loose", "a b")):
    """Its instances have a `__dict__`."""


def record(value: Any, *, allow_pickle: bool = False, spare: int = 0) -> np.ndarray:
    structure, arrays = encode(value, allow_pickle=allow_pickle)
    size = codec.record_size(structure, arrays)
    out = np.full(size + spare, 0xAB, np.uint8)
    assert codec.write_record(structure, arrays, out) == size
    return out


def same(a: Any, b: Any) -> bool:
    """Same types, same structure, same bits."""
    return fingerprint(a) == fingerprint(b)


torch_dtypes = st.sampled_from(sorted(TORCH_DTYPES.values(), key=str))
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
structured = st.sampled_from(
    [
        np.dtype([("a", "<i4"), ("b", ">f8", (2, 3)), ("c", [("d", "S3"), ("e", "?")])]),
        np.dtype({"names": ["x", "y"], "formats": ["u1", "f4"], "offsets": [0, 8], "itemsize": 16}),
        np.dtype([(("the title", "t"), "<i2")]),
    ]
)
array_dtypes = hnp.scalar_dtypes() | hnp.datetime64_dtypes() | hnp.timedelta64_dtypes() | structured
array_dtypes = array_dtypes | hnp.byte_string_dtypes(min_len=1) | hnp.unicode_string_dtypes(min_len=1)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(torch_dtypes), draw(shapes)
    count = math.prod(shape) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), np.uint8).copy()
    if dtype == torch.bool:
        data &= 1
    tensor = torch.from_numpy(data).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    views = {
        "plain": lambda: tensor, "transposed": lambda: tensor.permute(tuple(reversed(range(tensor.dim())))),
        "strided": lambda: tensor[..., ::2] if tensor.dim() else tensor,
        "expanded": lambda: tensor.unsqueeze(-1).expand(*shape, 3),
        "conj": lambda: tensor.conj() if dtype in (torch.complex64, torch.complex128) else tensor,
    }  # fmt: skip
    return views[draw(st.sampled_from([*views]))]()


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype, shape = draw(array_dtypes), draw(shapes)
    array = draw(hnp.arrays(dtype, shape)) if dtype.names is None else np.zeros(shape, dtype)
    array.flags.writeable = draw(st.booleans())
    views = {
        "plain": lambda: array, "fortran": lambda: np.asfortranarray(array),
        "strided": lambda: array[..., ::2] if array.ndim else array,
        "backward": lambda: array[::-1] if array.ndim else array,
    }  # fmt: skip
    return views[draw(st.sampled_from([*views]))]()


texts = st.text(st.characters(codec=None, exclude_categories=()))
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats() | st.booleans()
np_scalars = hnp.scalar_dtypes().flatmap(lambda dtype: hnp.arrays(dtype, ())).map(lambda array: array[()])
fixed_leaves = st.none() | numbers | tensors() | arrays() | np_scalars
leaves = fixed_leaves | texts | st.binary()
keys = texts | st.integers() | st.booleans() | st.none()


def containers(child: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists, dicts = st.lists(child, max_size=4), st.dictionaries(keys, child, max_size=4)
    named_tuples = st.builds(Sample, child, child) | st.builds(Loose, child, child)
    return lists | lists.map(tuple) | dicts | dicts.map(OrderedDict) | named_tuples


def trees(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(leaf, containers, max_leaves=8)


everyday = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@everyday
@given(trees(leaves) | trees(fixed_leaves), st.integers(0, 200), st.integers(0, 4))
def test_round_trip(value: Any, spare: int, count: int) -> None:
    written = record(value, spare=spare)
    for copy in (True, False):
        assert same(read_record(written, copy=copy), value)
    structure, leaf_arrays = encode(value)
    check_structure(structure, leaf_arrays)
    if structure.fixed:
        built = codec.stack_build(structure, [np.repeat(array[None, :], count, axis=0) for array in leaf_arrays], count)
        assert len(built) == count
        assert all(same(item, value) for item in built)
        out, written = np.full((2, codec.record_size(structure, leaf_arrays)), 0xAB, np.uint8)
        codec.write_record(structure, leaf_arrays, written)  # not encoded anew: bytes between fields have no value
        for part, data in zip(codec.open_record(structure, out), leaf_arrays, strict=True):  # composed in place
            assert np.shares_memory(part, out) or part.size == 0
            part[:] = data
        assert out.tobytes() == written.tobytes()


def check_structure(structure: Any, leaf_arrays: list[Any]) -> None:
    """It describes the packed data."""
    assert structure_of(bytes(structure.key)) is structure
    assert pickle.loads(pickle.dumps(structure)) is structure
    end = 0
    for leaf, array in zip(structure.leaves, leaf_arrays, strict=True):
        assert (array.dtype, array.ndim) == (np.uint8, 1)
        assert leaf.nbytes in (-1, array.size)
    for leaf, offset in zip(structure.leaves, structure.offsets, strict=structure.fixed):
        assert offset >= end
        assert offset % (64 if leaf.nbytes >= 64 else 16 if leaf.nbytes >= 16 else 8) == 0
        end = offset + leaf.nbytes
    assert end <= structure.size < end + 8 if structure.fixed else structure.size == -1


def deep(nest: Any, depth: int = 100) -> Any:
    return reduce(lambda value, _: nest(value), range(depth), 1)


@pytest.mark.parametrize("value", [
    (), [], {}, None, [None, (), {}, []], True, 2**63 - 1, -(2**63), -0.0, np.str_("kept\0"), np.bytes_(b"kept\0"), "",
    b"", np.float32(1), np.longdouble(1) / 3, np.datetime64("2020-01-01", "D"),
    np.zeros(2, [("a", "i4"), ("b", "f8")])[0], {True: "bool"}, OrderedDict(b=1, a=(2, OrderedDict())),
    {2**70: 1, "\ud83d\ude00": 2, "\U0001f600": 3}, torch.tensor(3), torch.zeros(0, 3),
    torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), np.zeros((0, 5)), np.array(5.0), np.arange(6)[::-2],
    np.lib.stride_tricks.as_strided(np.zeros(1), (1,), (3,)),
    *({str(n): n for n in range(20)}, OrderedDict((n, [n] * 9) for n in range(9)), [(*range(9), [1] * 9)]),
    np.frombuffer(struct.pack("<Q", 0x7FF4_DEAD_BEEF_0001), "<f8"), list(range(200)), list(range(300)),
    list(range(3_000)), deep(lambda v: (v, v), 12), deep(lambda v: [v]), deep(lambda v: {"a": v}),
    deep(lambda v: OrderedDict(a=v)), deep(lambda v: Sample(v, 1)),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_corner_values(value: Any) -> None:
    for copy in (True, False):
        assert same(read_record(record(value), copy=copy), value)


def test_keys_and_memory() -> None:
    image = torch.zeros(2, 3)
    structure, arrays = encode({"x": image, "y": (1, None, "text")})
    assert structure.key == b'd ["x", "y"]\ntensor 2,3 float32\nt 3\nint\n-\nstr'
    assert [leaf.kind for leaf in structure.leaves] == ["tensor", "int", "str"]
    assert arrays[0].ctypes.data == image.data_ptr()
    assert encode([1, np.arange(3), 1, np.arange(9)])[0].offsets == (0, 16, 40, 64)
    for count in (3, 300, 3_000):
        assert encode([1] * count)[0] is (kept := encode([2] * count)[0]) is structure_of(bytes(kept.key))
    assert len({encode({key: 0})[0].key for key in (1, True, False, 0, "1", None)}) == 6


@pytest.mark.parametrize(("copy", "shift", "text"), [(True, 1, "12345678"), (False, 8, 5), (False, 0, "")])
def test_complex_tensors_are_aligned(copy: bool, shift: int, text: Any) -> None:
    """torch crashes the process when it reads complex128 at an address that is no multiple of 16."""
    value = [1, text, torch.ones(1, dtype=torch.complex128), 1, torch.ones(9, dtype=torch.complex128)]
    written = record(value)
    memory = np.zeros(written.size + 64 + shift, np.uint8)
    buffer = memory[-memory.ctypes.data % 64 + shift :][: written.size]
    buffer[:] = written
    back = read_record(buffer, copy=copy)
    assert back[2].data_ptr() % 16 == back[4].data_ptr() % 16 == 0
    assert torch.equal(back[4] + back[2], torch.full((9,), 2, dtype=torch.complex128))


def test_values_have_the_strides_that_a_record_restores() -> None:
    value = [torch.zeros(2, 3).t(), np.zeros((2, 3)).T]
    kept, back = as_cached(value), read_record(record(value), copy=True)
    assert (kept[0].stride(), kept[1].strides) == (back[0].stride(), back[1].strides) != ((1, 3), (8, 24))


def test_a_new_class_of_the_same_name_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    old = record(Sample(1, 2))
    again = namedtuple("Sample", ["image", "label"])
    again.__module__ = Sample.__module__
    monkeypatch.setattr(sys.modules[Sample.__module__], "Sample", again)
    assert type(read_record(old, copy=True)) is again


def named(module: str, name: str, *fields: str) -> np.ndarray[Any, Any]:
    """A record of a named tuple of that name, forged."""
    lines = [f"n {json.dumps([module, name, fields])}", *["int"] * len(fields)]
    structure = structure_of("\n".join(lines).encode())
    out = np.zeros(4096, np.uint8)
    codec.write_record(structure, [np.zeros(8, np.uint8)] * len(fields), out)
    return out


class Lazy(ModuleType):
    """A module that imports something when it is looked at, as those of `importlib.util.LazyLoader` do."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was looked up")


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_record_imports_nothing(tmp_path: Path, allow_pickle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forged_module.py").write_text("class Sample(tuple): _fields = ('a',)\nraise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("forged_module", "antigravity", "concurrent.futures.nothing"):
        with pytest.raises(codec.MissingClassError, match=rf"named tuple {module}\.Sample.*import {module} where"):
            read_record(named(module, "Sample", "a"), copy=True, allow_pickle=allow_pickle)
    assert not {"forged_module", "antigravity"} & sys.modules.keys()


@pytest.mark.parametrize("name", ["lazily", "Sample.image", "os.stat_result", "stat", "os", "tuple", "values", "", "."])
def test_only_classes_of_modules_that_are_imported_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the dictionary of the module, so that nothing runs that it defines."""
    module = Lazy("forged")
    inside = {"Sample": Sample, "os": os, "stat": os.stat_result, "tuple": tuple, "values": Sample(1, 2)}
    ModuleType.__getattribute__(module, "__dict__").update(inside, __getattr__=lambda name: Sample)
    monkeypatch.setitem(sys.modules, "forged", module)
    monkeypatch.setitem(sys.modules, "object", object())
    for owner in ("forged", "object"):
        with pytest.raises(CodecError, match=r"named tuple|malformed"):
            read_record(named(owner, name, "image", "label"), copy=True, allow_pickle=True)
    assert type(read_record(named("forged", "Sample", "image", "label"), copy=True)) is Sample
    with pytest.raises(codec.MissingClassError, match="with the fields image, whose class is not here"):
        read_record(named("forged", "Sample", "image"), copy=True)


def test_what_a_worker_of_this_job_wrote_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pickle does, by which torch passes batches on."""
    (tmp_path / "lazily_imported.py").write_text("import collections\nSample = collections.namedtuple('Sample', 'a')")
    monkeypatch.syspath_prepend(tmp_path)
    assert codec.read_own_record(named("lazily_imported", "Sample", "a"), copy=True) == (0,)
    del sys.modules["lazily_imported"]
    with pytest.raises(ModuleNotFoundError):
        codec.read_own_record(named("never_there", "Sample", "a"), copy=True)
    with pytest.raises(CodecError, match="not here"):
        codec.read_own_record(named("sys", "Sample", "a"), copy=True)


ARRAYS = {
    "tensor": torch.arange(40), "other": torch.ones(3, dtype=torch.bfloat16), "array": np.arange(5.0),
    "empty": torch.zeros(0, 2),
}  # fmt: skip


@pytest.mark.parametrize(("name", "memory"), [("tensor", "array"), ("other", "mmap"), ("array", "mmap")])
def test_views_keep_the_buffer_alive(name: str, memory: str) -> None:
    written = record({**ARRAYS, "text": "abc"})
    buffer = written if memory == "array" else np.frombuffer(mmap.mmap(-1, written.size), np.uint8)
    buffer[:] = written
    alive, value = weakref.ref(buffer), read_record(buffer, copy=False)
    inside = range(buffer.ctypes.data, buffer.ctypes.data + buffer.size)
    assert all(value[each].data_ptr() in inside for each in ("tensor", "other"))
    assert value["array"].ctypes.data in inside
    kept = value[name]
    del value, buffer, written
    gc.collect()
    kept = kept[1:]  # a view of the view
    assert alive() is not None
    del kept
    assert alive() is None


def test_values_without_arrays_do_not_hold_the_buffer() -> None:
    buffer = record(("text", 1, np.float32(2), np.zeros(1, [("a", "i4")])[0], b"bytes"))
    kept, value = weakref.ref(buffer), read_record(buffer, copy=False)
    del buffer
    assert kept() is None
    assert value[0] == "text"


@pytest.mark.parametrize("copy", [True, False])
def test_copies_are_writable_and_their_own(copy: bool) -> None:
    """A read-only buffer is always copied."""
    buffer = record(ARRAYS) if copy else np.frombuffer(record(ARRAYS).tobytes(), np.uint8)
    value = read_record(buffer, copy=copy)
    assert not np.shares_memory(buffer, value["array"])
    value["tensor"].fill_(7)
    assert same(read_record(buffer, copy=copy), ARRAYS)


loose = Loose(1, 2)
loose.extra = 3
OTHERS = [
    ({"meta": [object()]}, r"sample\['meta'\]\[0\]: object: cannot be stored without pickle"),
    ((1, Sample(0, {1, 2})), r"sample\[1\]\.label: set: .*allow_pickle=True"),
    ([np.longlong(1)], r"sample\[0\]: numpy.longlong: cannot be stored"),
    (defaultdict(int, a=1), r"sample: collections.defaultdict: .*plain"),
    ({"x": {1.5: 2}}, r"sample\['x'\]: dict: has a key of type float"),
    ([{(1, 2): 3}], r"sample\[0\]: dict: has a key of type tuple"),
    ({"x": np.array([object()])}, r"sample\['x'\]: numpy.ndarray: has the dtype dtype"),
    ([np.ma.masked_array([1])], r"sample\[0\]: numpy.ma\S*MaskedArray: .*plain tensor, array"),
    ([torch.nn.Parameter(torch.ones(1))], r"sample\[0\]: torch.nn\S*Parameter: .*plain tensor"),
    ([torch.ones(1, requires_grad=True)], r"sample\[0\]: torch.Tensor: .*requires grad.*detach"),
    ([torch.ones(1, dtype=torch.bfloat16, requires_grad=True)], r"sample\[0\]: torch.Tensor: .*requires grad"),
    ([torch.ones(2, 2).to_sparse()], r"sample\[0\]: torch.Tensor: is torch.sparse_coo"),
    ([torch.ones(2, device="meta")], r"sample\[0\]: torch.Tensor: .*on meta"),
    ([torch.max(torch.ones(2, 2), 0)], r"sample\[0\]: torch.return_types.max: "),
    ([namedtuple("Lost", "a")(1)], r"sample\[0\]: \S*Lost: .*top level"), (loose, "without pickle"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "message"), OTHERS, ids=[message[:40] for _, message in OTHERS])
def test_what_is_not_stored_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        encode(value)


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_value_that_contains_itself(kind: type, allow_pickle: bool) -> None:
    value: Any = kind()
    value.append(value) if kind is list else value.update(me=value)
    with pytest.raises(CodecError, match="contains itself"):
        encode(value, allow_pickle=allow_pickle)


def test_pickle_only_with_permission_on_both_sides() -> None:
    for value in (10**5000, 2**63, bytearray(b"1"), [{1, 2}, defaultdict(int, a=torch.ones(2)), torch.zeros(3)]):
        with pytest.raises(CodecError, match="allow_pickle=True"):
            encode(value)
        written = record(value, allow_pickle=True)
        with pytest.raises(CodecError, match="allow_pickle=True"):
            read_record(written, copy=True)
        assert same(read_record(written, copy=True, allow_pickle=True), value)
        assert encode(value, allow_pickle=True)[0].pickled
    with pytest.raises(CodecError, match=r"sample\[0\].*cannot be pickled either"):
        encode([lambda: 0], allow_pickle=True)


def image(mode: str, size: tuple[int, int] = (5, 3)) -> Any:
    data = np.random.default_rng(0).integers(0, 255, size[0] * size[1] * BANDS[mode], np.uint8)
    return Image.frombytes(mode, size, data.tobytes())


@pytest.mark.parametrize(("mode", "size"), [*((mode, (5, 3)) for mode in BANDS), ("RGB", (0, 4))])
def test_images_come_back_with_memory_of_their_own(mode: str, size: tuple[int, int]) -> None:
    before = image(mode, size)
    structure, (pixels,) = encode(before)
    assert codec.stack_build(structure, [pixels[None]], 1)[0].tobytes() == before.tobytes()
    before.info = {"dpi": (72, 72.5), "exif": b"Exif", "comment": "none"}
    out = record((before, 7))
    made, label = read_record(out, copy=False)
    out[:] = 0
    assert (made.mode, made.size, made.tobytes()) == (mode, size, before.tobytes())
    assert (made.info, label, type(made)) == (before.info, 7, type(before))


def test_other_images_need_a_pickle() -> None:
    buffer = io.BytesIO()
    image("RGB").save(buffer, "PNG")
    for other in (Image.open(io.BytesIO(buffer.getvalue())), image("RGB").quantize(4), Image.new("I;16", (2, 2))):
        with pytest.raises(CodecError, match="cannot be stored without pickle"):
            encode(other)
        back = read_record(record(other, allow_pickle=True), copy=True, allow_pickle=True)
        assert (back.mode, back.tobytes()) == (other.mode, other.tobytes())


def read_or_refuse(buffer: np.ndarray) -> None:
    """A damaged record raises CodecError or gives some value, whose memory can be touched."""
    for copy in (True, False):
        with contextlib.suppress(CodecError):
            deepcopy(read_record(buffer, copy=copy))


@everyday
@given(trees(leaves), st.data())
def test_truncated_and_flipped(value: Any, data: st.DataObject) -> None:
    written = record(value)
    cut = written[: data.draw(st.integers(0, written.size - 1))].copy()
    with pytest.raises(CodecError):
        read_record(cut, copy=True)
    for _ in range(data.draw(st.integers(1, 4))):
        written[data.draw(st.integers(0, min(written.size, 400) - 1))] = data.draw(st.integers(0, 255))
    read_or_refuse(written)


@everyday
@given(st.binary(max_size=200), st.binary(max_size=64), st.integers(0, 3))
def test_arbitrary_keys(key: bytes, rest: bytes, variable: int) -> None:
    head = struct.pack("=IIII", codec.MAGIC, len(key), variable, 0)
    read_or_refuse(np.frombuffer(head + key + rest + bytes(256), np.uint8).copy())


@pytest.mark.parametrize("key", [
    "", "t", "t 2\nint", "t 1\nint\nint", "t 99999999999\nint", 't "2"\nint\nint', "int\nint", "-\nint", 'd ["a"]',
    "d [[1]]\nint", "d [1.5]\nint", 'd "a"\nint', "x []", 'n ["os","system",["a"]]\nint',
    'n ["no_such_module_here","X",["a"]]\nint', 'n ["","",[]]', "s [1]\narray 2 |u1", "s [0,1]\nint",
    "t " + "[" * 100_000, "l 1\n" * 500 + "int", "nothing", "int 3 u1", "tensor -1 uint8", "tensor - uint8",
    "tensor 3 nothing", "tensor 0,99999999999999999999 uint8", "tensor 4611686018427387904,4 uint8", "array 2 |O",
    "array 2 |S0", "array 2 [[", '0\narray 2 [["a","|O"]]', "array 2 i4,i4", "scalar 2 |u1",
    "tensor " + ",".join(["1"] * 100) + " uint8", "p \nd []", "p RGB\nint\nd []", "s [0]\nint", "s []\nint",
    "p P\narray 3,5 |u1\nd []", "p RGB\narray 3,5 |u1\nd []", "p RGB\narray 3,5,3 |u1\n-",
], ids=lambda key: key[:40])  # fmt: skip
def test_malformed_keys(key: str) -> None:
    head = struct.pack("=IIII", codec.MAGIC, len(key), 0, 0)
    with pytest.raises(CodecError):
        read_record(np.frombuffer(head + key.encode() + bytes(512), np.uint8).copy(), copy=False)


@pytest.mark.parametrize("buffer", [np.zeros(100, np.float32), np.zeros(64, np.uint8), np.zeros(3, np.uint8)])
def test_what_is_no_record(buffer: np.ndarray) -> None:
    with pytest.raises(CodecError, match="malformed"):
        read_record(buffer, copy=True)


@pytest.mark.parametrize("wrong", [2**63, 2**64 - 1, 1 << 20])
def test_a_lengths_table_beyond_the_buffer(wrong: int) -> None:
    written, lengths = record(["a", "b"]), encode(["a", "b"])[0].head.size
    written[lengths : lengths + 8] = np.array([wrong], np.uint64).view(np.uint8)
    with pytest.raises(CodecError):
        read_record(written, copy=True)
