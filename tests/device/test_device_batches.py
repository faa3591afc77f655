"""Supported types of batches, and their form on the device."""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from fakes import World
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import stallfree as sf
from loader_data import Pair, Point
from stallfree.device import process

attrs = pytest.importorskip("attrs")


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


class Encoding(UserDict[str, Any]):
    """Like the output of some tokenizers: a mapping with attributes and its own `.to()`."""

    def __init__(self, data: dict[str, Any], tokens: list[str]) -> None:
        super().__init__(data)
        self.tokens = tokens

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("data", {}):
            return self.data[name]
        raise AttributeError(name)

    def to(self, device: torch.device) -> Encoding:
        raise AssertionError("it is looked into instead")


class Output(OrderedDict[str, Any]):
    """Like the output of some models: a mapping whose entries are also attributes."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Named(list[Any]):
    def __init__(self, *values: Any) -> None:
        super().__init__(values)
        self.name = "its name"


@dataclasses.dataclass
class Graph:
    nodes: torch.Tensor
    name: str
    edges: dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    count: int = 3

    def __post_init__(self) -> None:
        assert type(self.x) is torch.Tensor, "made anew with something else"


@attrs.frozen
class Defined:
    x: torch.Tensor
    note: str


class Box:
    """An unknown container: sent by its own `.to()`, which has no `non_blocking`."""

    def __init__(self, content: torch.Tensor, device: str = "here") -> None:
        self.content, self.device = content, device

    def to(self, device: torch.device) -> Box:
        return type(self)(self.content.clone(), str(device))


class Dictionary(Box):
    """Like `TensorDict`: its memory can be kept."""

    streams: ClassVar[list[Any]] = []

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


CONTAINERS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: numbers(4, 3),
    "dict": lambda: {"images": numbers(4, 3), 7: numbers(4), "names": ["a", "b"], "none": None},
    "nested": lambda: [{"a": (numbers(2), [numbers(3)])}, (), {}, [numbers(1), 5, "text", b"bytes", 1.5, True]],
    "ordered": lambda: OrderedDict(b=numbers(2), a=numbers(3)), "default": lambda: defaultdict(list, {"x": numbers(4)}),
    "the same twice": lambda: [{"a": one, "b": [one, one[1:3]]} for one in [numbers(5)]],
    "user's dict": lambda: UserDict({"x": numbers(3)}),
    "encoding": lambda: Encoding({"ids": numbers(2, 3), "mask": numbers(2, 3)}, ["a", "b"]),
    "output": lambda: Output(logits=numbers(2, 3), loss=numbers(1)),
    "read-only": lambda: types.MappingProxyType({"x": numbers(3)}), "list of its own": lambda: Named(numbers(3), 1),
    "named tuple": lambda: Pair(numbers(3), Point(numbers(2), 1.5)),
    "what sort gives": lambda: [torch.sort(numbers(5)), torch.Size([2, 3])],
    "dataclass": lambda: Graph(numbers(3), "its name", {"a": numbers(2, 2)}),
    "frozen dataclass": lambda: Frozen(numbers(3)), "attrs": lambda: Defined(numbers(3), "a note"),
    "packed": lambda: pack_sequence([numbers(2, 3), numbers(4, 3), numbers(1, 3)], enforce_sorted=False),
    "a class": lambda: {"kind": Graph, "x": numbers(1)},
    "no tensor": lambda: [[], {}, None, 3, "text", (), {"a": [1, 2]}],
}  # fmt: skip


def flat(value: Any) -> list[Any]:
    """Return the types and keys of all containers in a value, attributes included, and what they hold."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return flat(list(value.unbind()))
    if isinstance(value, torch.Tensor | type | str):
        return [value]
    parts: dict[Any, Any] = {}
    if isinstance(value, Mapping):
        parts |= {("key", key): value[key] for key in value}
    elif isinstance(value, list | tuple):
        parts |= dict(enumerate(value))
    if not isinstance(value, Mapping) or isinstance(value, Encoding | Output):
        names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
        parts |= {name: getattr(value, name) for name in names if not name.startswith("__")}
    if not parts:
        return [value]
    return [type(value), *parts, *(leaf for part in parts.values() for leaf in flat(part))]


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flat(value) if isinstance(leaf, torch.Tensor)]


def same(found: Any, given: Any) -> None:
    for mine, theirs in zip(flat(found), flat(given), strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, torch.Tensor):
            assert (mine.dtype, mine.layout, mine.shape) == (theirs.dtype, theirs.layout, theirs.shape)
            assert not mine.requires_grad
            assert mine.to_dense().eq(theirs.to_dense()).all()
        else:
            assert mine == theirs


def send(device: World, batch: Any) -> Any:
    prefetcher = sf.DevicePrefetcher([batch], "cuda")
    (found,) = prefetcher
    device.synchronize()
    prefetcher.close()
    return found


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_arrives_as_it_was_with_its_tensors_on_the_device(kind: str, device: World) -> None:
    batch = CONTAINERS[kind]()
    before = [(id(tensor), tensor.clone()) for tensor in tensors(batch)]
    found = send(device, batch)
    same(found, batch)
    if isinstance(found, Output | Encoding):  # attributes that show an entry show the new one
        assert all(getattr(found, name) is found[name] for name in found)
    for tensor in tensors(found):
        assert device.on_device(tensor) is not (isinstance(batch, PackedSequence) and tensor is found.batch_sizes)
    assert [id(tensor) for tensor in tensors(batch)] == [number for number, _ in before]
    assert all(torch.equal(tensor, old) for tensor, (_, old) in zip(tensors(batch), before, strict=True))


PICTURES = numbers(2, 3, 5, 4)
TENSORS = {
    "scalar": torch.tensor(3.5), "empty": torch.empty(0, 3), "bool": numbers(9) > 4,
    "half": numbers(9, dtype=torch.bfloat16), "complex": torch.complex(numbers(4), -numbers(4)),
    "conjugate": torch.complex(numbers(4), -numbers(4)).conj(),
    "negative": torch.complex(numbers(4), -numbers(4)).conj().imag,
    "channels last": PICTURES.to(memory_format=torch.channels_last),
    "channels last, 3d": numbers(1, 2, 3, 4, 5).to(memory_format=torch.channels_last_3d),
    "transposed": numbers(30, 20).t(), "expanded": numbers(4, 1).expand(4, 300),
    "with gaps": numbers(40, 40)[::2, 5:30], "from the middle": numbers(3000)[100:900], "large": numbers(100, 100),
    "large channels last": numbers(2, 3, 50, 40).to(memory_format=torch.channels_last),
}  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_arrives_with_its_values_and_with_its_strides_if_it_has_no_gaps(kind: str, device: World) -> None:
    given = TENSORS[kind]
    found = send(device, [numbers(3), given, numbers(5)])[1]
    same(found, given)
    assert not found.is_conj()
    assert not found.is_neg()
    assert found.stride() == (given.stride() if "channels" in kind else given.contiguous().stride())


def test_small_tensors_share_a_copy_and_pinned_are_not_staged(device: World, monkeypatch: pytest.MonkeyPatch) -> None:
    large = numbers(100, 100)
    send(device, {"a": numbers(3), "b": [numbers(5), torch.tensor(1)], "large": large})
    assert len(device.copies) == 2
    monkeypatch.setattr(device, "stage", None)
    assert torch.equal(send(device, [device.lend(large)])[0], large)


def test_tensors_of_a_batch_share_nothing_that_autograd_knows(device: World) -> None:
    """Labels may be changed in place while the pictures are saved for a backward pass."""
    labels, weights = send(device, [numbers(3), numbers(5)])
    version = weights._version
    labels.add_(1)
    assert weights._version == version
    assert torch.equal(weights, numbers(5))


class Marked(torch.Tensor):
    """A subclass of tensors."""


SELF_SENT: dict[str, Callable[[], Any]] = {
    "sparse": lambda: numbers(4, 4).to_sparse(), "sparse rows": lambda: numbers(4, 4).to_sparse_csr(),
    "marked": lambda: numbers(4).as_subclass(Marked), "box": lambda: Box(numbers(4)),
    "dictionary": lambda: Dictionary(numbers(4)),
    "nested": lambda: torch.nested.nested_tensor([numbers(2), numbers(3)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", SELF_SENT)
def test_what_cannot_be_pinned_goes_by_itself_with_one_warning_if_that_is_slow(kind: str, device: World) -> None:
    device.device = torch.device("cpu", 0)  # which tensors of the host are not on
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = [{"odd": SELF_SENT[kind](), "x": numbers(3) + number} for number in range(4)]
        transform = (lambda batch: batch) if kind == "dictionary" else None
        prefetcher = sf.DevicePrefetcher(batches, "cuda", transform_on_device=transform)
        found = list(prefetcher) + list(prefetcher)
        device.synchronize()
        prefetcher.close()
    mine = [str(warning.message) for warning in caught if "by its own .to()" in str(warning.message)]
    assert len(mine) == (kind != "dictionary")
    assert all(f"a {type(batches[0]['odd']).__name__} is sent to cpu:0" in each for each in mine)
    for number, batch in enumerate(found):
        assert torch.equal(batch["x"], numbers(3) + number % 4)
        odd = batch["odd"]
        assert type(odd) is type(batches[0]["odd"])
        assert not isinstance(odd, Box) or odd.device == "cpu:0"
        assert not isinstance(odd, Dictionary) or device.main in odd.streams


def all_kinds() -> list[Any]:
    """A loader for another process, whose batches are all of the above."""
    containers = [make() for kind, make in CONTAINERS.items() if kind != "read-only"]  # which cannot be pickled
    return containers + list(TENSORS.values()) + [SELF_SENT[kind]() for kind in ("sparse", "marked", "nested")]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_all_of_them_pass_from_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_START_METHOD", "forkserver")
    with sf.ProcessPrefetcher(all_kinds, "cpu", timeout=60) as prefetcher:
        for batch, expected in zip(prefetcher, all_kinds(), strict=True):
            same(batch, expected)
