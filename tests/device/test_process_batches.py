"""`ProcessPrefetcher` yields the batches of its loader, with its errors in their places."""

from __future__ import annotations

import gc
import pickle
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import ASKED, PATIENCE, Script, read_stamp, wait_for
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import stallfree as sf
from children import Child
from stallfree import ProcessPrefetcher
from stallfree.device import process

Pair = namedtuple("Pair", "left right")


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts processes like "spawn", with the imports already done."""
    monkeypatch.setattr(process, "_START_METHOD", "forkserver")


@dataclass
class Served:
    """Return a prefetcher over a scripted loader."""

    script: Script
    prefetcher: ProcessPrefetcher


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The prefetcher of all tests of this module that need no other."""
    script = Script(tmp_path_factory.mktemp("served"))
    with ProcessPrefetcher(script.make(), "cpu", depth=2, timeout=PATIENCE) as prefetcher:  # by "spawn"
        script.write(batches=9, rows=40)
        for batch in prefetcher:  # now it is connected, and knows all slots
            read_stamp(batch, 40)
        del batch
        yield Served(script, prefetcher)


def test_epochs_are_whole(served: Served) -> None:
    served.script.write(batches=20)
    first = read_stamp(next(iter(served.prefetcher)))[0] + 1
    for epoch in range(first, first + 2):
        assert [read_stamp(batch) for batch in served.prefetcher] == [(epoch, number) for number in range(20)]
    assert len(served.prefetcher) == 20


def test_sizes_change(tmp_path: Path) -> None:
    script = Script(tmp_path)
    with ProcessPrefetcher(script.make(), "cpu", timeout=PATIENCE) as prefetcher:
        for epoch, rows in enumerate((4, 60, 1)):
            script.write(batches=7, rows=rows, last=2)
            got = [read_stamp(batch, 2 if number == 6 else rows) for number, batch in enumerate(prefetcher)]
            assert got == [(epoch, number) for number in range(7)]


def test_an_empty_epoch(served: Served) -> None:
    served.script.write(batches=0)
    assert list(served.prefetcher) == []
    assert len(served.prefetcher) == 0


def test_a_broken_off_epoch_leaves_nothing_behind(served: Served) -> None:
    served.script.write(batches=9)
    epochs = []
    for take in (3, 9, 0, 9):
        got = []
        iteration = iter(served.prefetcher)
        for _ in range(take):
            got.append(read_stamp(next(iteration)))
        assert [number for _, number in got] == list(range(take))
        epochs += [epoch for epoch, _ in got[:1]]
    assert sorted(set(epochs)) == epochs  # never a batch of an epoch before
    assert list(iteration) == []
    with pytest.raises(StopIteration):
        next(iteration)


def test_the_loader_is_no_further_ahead_than_it_may_be(served: Served) -> None:
    """`depth` batches are ready, one is in use, and the process has taken one more from the loader."""
    counts = served.script.map()
    counts[ASKED] = 0
    served.script.write(batches=60)
    for number, batch in enumerate(served.prefetcher):
        assert read_stamp(batch)[1] == number
        if number % 20 == 0:
            wait_for(lambda: counts[ASKED] == min(60, number + 4), "the loader to be ahead")  # noqa: B023
    assert number == 59


def test_batches_may_be_kept_and_changed(served: Served) -> None:
    served.script.write(batches=12)
    with torch.inference_mode():
        for batch in served.prefetcher:
            batch["pixels"].add_(1)
    kept = list(served.prefetcher)
    for number, batch in enumerate(kept):
        assert read_stamp(batch)[1] == number
        assert not batch["pixels"].is_inference()
        assert batch["pixels"].is_shared()


@pytest.mark.parametrize("ends", [False, True])
def test_errors_of_the_loader_come_in_their_place(served: Served, ends: bool) -> None:
    served.script.write(batches=8, errors=[0, 3, 4], ends=ends)
    iteration = iter(served.prefetcher)
    for number in [0] if ends else range(8):
        if number in (0, 3, 4):
            with pytest.raises(FileNotFoundError, match=f"no picture for batch {number}") as caught:
                next(iteration)
            assert caught.value.errno == 2
            assert "in __next__" in caught.value.__notes__[-1]
        else:
            assert read_stamp(next(iteration))[1] == number
    assert list(iteration) == []


def test_it_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.write(batches=6, hang=2)
    with ProcessPrefetcher(script.make(), "cpu", timeout=PATIENCE) as prefetcher:
        iteration = iter(prefetcher)
        assert [read_stamp(next(iteration))[1] for _ in range(2)] == [0, 1]
        prefetcher.timeout = 0.05
        for _ in range(2):
            with pytest.raises(sf.WaitError, match=r"0.05 s for batch 2 of the epoch"):
                next(iteration)
        prefetcher.timeout = PATIENCE
        script.release()
        assert [read_stamp(batch)[1] for batch in iteration] == [2, 3, 4, 5]


# -- what a batch may be ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """A container other than dict, list or tuple."""

    image: torch.Tensor
    name: str


class Labelled(torch.Tensor):
    """A tensor that is not plain."""


def many_kinds() -> list[Any]:
    """A loader with one batch of all types."""
    base = torch.arange(24.0).reshape(2, 3, 4)
    return [
        torch.arange(5),
        [torch.tensor(3.5), torch.zeros(0, 7), torch.tensor([True, False])],
        (base.transpose(0, 2), base[:, ::2], base[:1].expand(4, 3, 4)),
        torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last),
        Pair(torch.ones(3, dtype=torch.bfloat16), {"path": "a.png", 7: None}),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, requires_grad=True),
        OrderedDict(z=torch.ones(1), a=Pair(torch.zeros(2), "x")),
        Record(torch.full((300, 300), 2.0), "b.png"),
        pack_sequence([torch.arange(3), torch.arange(2)]),
        ["only", "strings"],
        {"sparse": torch.eye(3).to_sparse(), "again": torch.eye(2).to_sparse()},
        {"label": torch.ones(2).as_subclass(Labelled)},
        {"nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
        {},
        None,
    ]  # fmt: skip


def same(got: Any, wanted: Any) -> bool:
    """Return whether two values are equal in types and contents."""
    if isinstance(wanted, torch.Tensor):
        if type(got) is not type(wanted) or got.dtype != wanted.dtype or got.layout != wanted.layout:
            return False
        if wanted.is_nested:
            return all(same(*pair) for pair in zip(got.unbind(), wanted.unbind(), strict=True))
        dense = [value.detach().to_dense() if value.is_sparse else value.detach() for value in (got, wanted)]
        return got.shape == wanted.shape and bool(dense[0].eq(dense[1]).all())
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, PackedSequence):
        return all(same(left, right) for left, right in zip(got, wanted, strict=True))
    if isinstance(wanted, dict):
        return list(got) == list(wanted) and all(same(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list | tuple):
        return len(got) == len(wanted) and all(same(*pair) for pair in zip(got, wanted, strict=True))
    if isinstance(wanted, Record):
        return same(got.image, wanted.image) and got.name == wanted.name
    return bool(got == wanted)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_batches_of_all_kinds() -> None:
    torch.manual_seed(1)
    wanted = many_kinds()
    with ProcessPrefetcher(seeded_kinds, "cpu", timeout=PATIENCE) as prefetcher:
        for epoch in range(2):
            for number, batch in enumerate(prefetcher):
                assert same(batch, wanted[number]), (epoch, number, batch)
            assert number == len(wanted) - 1


def seeded_kinds() -> list[Any]:
    """The layout is the same in each process."""
    torch.manual_seed(1)
    return many_kinds()


class Anew:
    """A loader without a length."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __iter__(self) -> Any:
        return iter(self.make())


# -- faults -----------------------------------------------------------------------------------------------------------


class Unsendable(Exception):
    """An error that cannot be sent."""

    def __init__(self, lock: Any) -> None:
        super().__init__("with a lock")
        self.lock = lock


def raising(kind: str) -> Any:
    """A function that returns no loader."""
    if kind == "unsendable":
        raise Unsendable(threading.Lock())
    return 5


def with_a_lock() -> Iterator[Any]:
    yield torch.ones(1)
    yield {"lock": threading.Lock()}
    yield torch.ones(2)


class FailsToLoad:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return raising, ("unsendable",)

    def __call__(self) -> Any:
        return []


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (partial(raising, "number"), sf.InputError, "the loader is a int, which cannot be iterated"),
        (FailsToLoad(), Unsendable, "with a lock"),
    ],
)
def test_what_makes_the_loader_fails(make: Any, kind: type[Exception], text: str) -> None:
    with ProcessPrefetcher(make, "cpu", timeout=PATIENCE) as prefetcher:
        for _ in range(2):
            iteration = iter(prefetcher)
            with pytest.raises(kind, match=text):
                next(iteration)
            assert list(iteration) == []
        with pytest.raises((kind, TypeError)):
            len(prefetcher)


def test_a_batch_that_cannot_be_sent_is_an_error_in_its_place() -> None:
    with ProcessPrefetcher(partial(Anew, with_a_lock), "cpu", timeout=PATIENCE) as prefetcher:
        iteration = iter(prefetcher)
        assert next(iteration).shape == (1,)
        with pytest.raises(TypeError, match="lock"):
            next(iteration)
        assert next(iteration).shape == (2,)
        assert list(iteration) == []
        with pytest.raises(TypeError, match="len"):
            len(prefetcher)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"make_loader": [1]}, "make_loader=.*function without arguments"),
        ({"make_loader": lambda: [1]}, "top level of a module"),
        ({"depth": 0}, "depth=0: give a whole number"),
        ({"depth": True}, "depth=True"),
        ({"timeout": 0}, "timeout=0: give the seconds"),
        ({"timeout": "5"}, "timeout='5'"),
        ({"device": "cpuu"}, "device='cpuu' is no device"),
        ({"device": "meta"}, "device='meta': processes share memory"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(sf.InputError, match=text):
        ProcessPrefetcher(**({"make_loader": seeded_kinds, "device": "cpu"} | arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(sf.InputError, match="PyTorch sees no GPU"):
        ProcessPrefetcher(seeded_kinds, "cuda")


def test_its_ends(served: Served) -> None:
    with pytest.raises(sf.InputError, match="belongs to the process that made it"):
        pickle.dumps(served.prefetcher)
    prefetcher = ProcessPrefetcher(seeded_kinds, "cpu", timeout=PATIENCE)
    iteration = iter(prefetcher)
    next(iteration)
    prefetcher.close()
    prefetcher.close()
    assert list(iteration) == []
    for late in (iter, len):
        with pytest.raises(sf.ProducerError, match="has ended, or was closed"):
            late(prefetcher)
    ProcessPrefetcher(seeded_kinds, "cpu").close()  # before it has begun


def test_it_lives_as_long_as_it_is_iterated() -> None:
    iteration = iter(ProcessPrefetcher(seeded_kinds, "cpu", timeout=PATIENCE))
    gc.collect()
    assert next(iteration).tolist() == [0, 1, 2, 3, 4]
    del iteration  # and no longer: the fixture of all tests sees what is left


def test_a_forked_child_cannot_go_on_with_it(served: Served) -> None:
    served.script.write(batches=3)
    iteration = iter(served.prefetcher)
    read_stamp(next(iteration))

    def use() -> None:
        with pytest.raises(sf.InputError, match=r"belongs to process \d+, and this process is a child of it"):
            next(iteration)
        with pytest.raises(sf.InputError, match=r"belongs to process \d+, and this process is a child of it"):
            iter(served.prefetcher)
        served.prefetcher.close()

    assert Child(use).wait() == 0
    assert [read_stamp(batch)[1] for batch in iteration] == [1, 2]


def shuffled() -> Any:
    return sf.DataLoader(list(range(30)), 5, shuffle=True)


def test_its_loader_draws_a_seed_that_follows_from_torchs_generator_here() -> None:
    def order() -> list[int]:
        with ProcessPrefetcher(shuffled, "cpu", timeout=PATIENCE) as prefetcher:
            return [id for batch in prefetcher for id in batch.tolist()]

    torch.manual_seed(1)
    first, second = order(), order()
    assert first != second
    torch.manual_seed(1)
    assert order() == first
