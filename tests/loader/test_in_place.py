"""Samples prepared in the rows of their batch, directly from the cache."""

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker

import stallfree as sf
from loader_data import Point, same
from stallfree.cache.sample_cache import SampleCache
from stallfree.datasets.reader import Reader
from stallfree.loader.collate import BatchBuffer, Bytes, batch_structure, collate_default, stack
from stallfree.pipeline.codec import encode, read_record
from stallfree.pipeline.compose import Compose, OnItem, empty, in_place
from stallfree.pipeline.compose import given as given_row
from stallfree.sources.mapped import BaseSource

COUNT = 12
SIDE = 24


def picture(id: int) -> np.ndarray[Any, Any]:
    """Return bytes whose size and content are a function of the id."""
    rng = np.random.default_rng(id)
    return rng.integers(0, 256, (30 + 3 * id, 60 - 2 * id, 3), np.uint8)


def encoded(id: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture(id)).save(file, "JPEG")
    return file.getvalue()


class Pictures(BaseSource):
    """Source of pairs (picture, encoded or not; label) that counts its fetches."""

    def __init__(self, make: Callable[[int], Any], *steps: Any) -> None:
        self.make, self.pipeline, self.reads = make, Compose(steps), 0

    def __len__(self) -> int:
        return COUNT

    def _record(self, id: int) -> Any:
        self.reads += 1
        return self.make(id), id

    def _where(self, id: int) -> str:
        return f"picture {id}"

    def fingerprint(self) -> str:
        return f"{self.make.__name__} {self.pipeline}"


def on_picture(*steps: Any) -> list[Any]:
    return [OnItem(0, step) for step in steps]


@contextlib.contextmanager
def reading(source: Pictures, **options: Any) -> Iterator[Reader]:
    """Return a reader whose cache holds all records of `source` as fetched."""
    with SampleCache(COUNT, capacity="4MiB", fingerprint="tested", **options) as cache:
        reader = Reader(source, cache, Compose([]), source.pipeline)
        reader.finish(reader.start(np.arange(COUNT)), 0, 0, skip=False)
        yield reader
        reader.close()


def make_buffer(reader: Reader, count: int) -> tuple[BatchBuffer, np.ndarray[Any, Any]]:
    """Return a buffer for samples like those of the reader, and its memory."""
    memory = np.zeros(4 << 20, np.uint8)
    first = reader.finish(reader.start(np.arange(1)), 0, 0, skip=False).values[0]
    buffer = BatchBuffer(encode(first)[0], count, lambda size: memory[:size])
    assert 0 < buffer.size <= memory.size
    return buffer, memory


@in_place
class Flip:
    """Mirrors with probability `p`, in the row itself if that is where the picture is."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, pixels: Any, out: Any = None) -> Any:
        if random.random() >= self.p:
            return pixels
        mirrored = pixels if given_row(out, pixels) else empty(out, pixels.shape)
        mirrored[...] = pixels[:, ::-1].copy()
        return mirrored


@in_place
class Center:
    """The central part, of a fixed size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, pixels: Any, out: Any = None) -> Any:
        top, left = (pixels.shape[0] - self.size) // 2, (pixels.shape[1] - self.size) // 2
        part = empty(out, (self.size, self.size, 3))
        part[...] = pixels[top : top + self.size, left : left + self.size]
        return part


@in_place
class ChannelsFirst:
    def __call__(self, pixels: Any, out: Any = None) -> Any:
        moved = empty(out, (3, *pixels.shape[:2]))
        moved[...] = pixels.transpose(2, 0, 1).copy()
        return moved


sf.mark_random(Flip)
sf.mark_deterministic(Center)
sf.mark_deterministic(ChannelsFirst)

LAST = [sf.vision.RandomResizedCrop(SIDE, flip=0.5), Center(SIDE)]
OTHERS = [Flip(), sf.vision.RandomResizedCrop((40, 30))]


@settings(max_examples=8)
@given(
    before=st.lists(st.sampled_from(OTHERS), max_size=3),
    last=st.sampled_from(LAST),
    after=st.lists(st.sampled_from([OTHERS[0], LAST[1]]), max_size=3),
    end=st.lists(st.just(ChannelsFirst()), max_size=1),
    form=st.sampled_from(["fetched", "prepared"]),
)
def test_batches_are_those_that_torch_makes_of_the_samples(
    before: list[Any], last: Any, after: list[Any], end: list[Any], form: Any
) -> None:
    steps = [Flip(0.5), *before, last, *after, *end]
    source = Pictures(encoded, *on_picture(sf.DecodeImage(), *steps))
    with sf.CachedDataset(source, capacity="8MiB", form=form, seed=3) as cached:
        reader = cached.reader
        assert reader.in_place
        loader = sf.DataLoader(cached, batch_size=5, shuffle=True, seed=3)
        for epoch in range(2):
            for pictures, labels in loader:
                pending = reader.start(labels.numpy())
                values = reader.finish(pending, 3, epoch, skip=False).values
                wanted, numbers = torch.utils.data.default_collate(values)
                assert torch.equal(labels, numbers)
                assert torch.equal(pictures, wanted)


def test_results_are_rows_and_nothing_is_copied_out_of_the_cache() -> None:
    seen = []

    @in_place
    class Look:
        def __call__(self, pixels: Any, out: Any = None) -> Any:
            seen.append(pixels)
            return pixels

    steps = [Look(), sf.vision.RandomResizedCrop(SIDE), Flip(1)]
    source = Pictures(picture, *on_picture(*steps, Look()))
    with reading(source) as reader:
        buffer, memory = make_buffer(reader, COUNT)
        seen.clear()
        samples = reader.finish(reader.start(np.arange(COUNT)), 0, 0, skip=False, buffer=buffer)
        assert buffer.whole
        assert samples.values == []
        assert samples.ids == list(range(COUNT))
        for before, after in zip(seen[::2], seen[1::2], strict=True):
            assert np.shares_memory(after, memory)
            assert not before.flags.owndata
        plain = reader.finish(reader.start(np.arange(COUNT)), 0, 0, skip=False).values
        pictures, labels = read_record(memory, copy=True)
        assert labels.tolist() == list(range(COUNT))
        assert all((a.numpy() == b).all() for a, (b, _) in zip(pictures, plain, strict=True))
        del seen[:], before, after


def test_what_is_changed_while_it_is_read_comes_from_the_source() -> None:
    caches: list[Any] = []

    @in_place
    class Disturbed:
        """At the third call, another process replaces the record that is being read."""

        calls = 0

        def __call__(self, pixels: Any, out: Any = None) -> Any:
            self.calls += 1
            part = empty(out, (2, 2, 3))
            if self.calls == 3 and caches:
                caches[0].drop([2])
                caches[0].put_many([2], [(np.zeros_like(pixels), 77)])
                pixels = np.full_like(pixels, 9)  # as it would look by now
            part[...] = pixels[:2, :2]
            return part

    step = Disturbed()
    source = Pictures(picture, OnItem(0, step))
    with reading(source) as reader:
        assert isinstance(reader.cache, SampleCache)
        buffer, memory = make_buffer(reader, 5)
        caches.append(reader.cache)
        step.calls, source.reads, before = 0, 0, reader.cache.stats()
        samples = reader.finish(reader.start(np.arange(5)), 0, 0, skip=False, buffer=buffer)
        pictures, labels = read_record(memory, copy=True)
        assert labels.tolist() == [0, 1, 2, 3, 4]
        assert [p[0, 0, 0] for p in pictures] == [picture(id)[0, 0, 0] for id in range(5)]
        after = reader.cache.stats()
        assert (samples.hits, samples.misses, source.reads) == (4, 1, 1)
        assert (after.hits - before.hits, after.misses - before.misses) == (4, 1)
        assert after.storage_reads - before.storage_reads == 1
        caches.clear()


@in_place
class Named:
    """Raises, or returns another structure, for some labels."""

    def __init__(self, odd: dict[int, str]) -> None:
        self.odd = odd

    def __call__(self, sample: Any, out: Any = None) -> Any:
        _, id = sample
        what = self.odd.get(id, "")
        if what == "fails":
            raise ValueError("cannot be seen")
        first = empty(out, (3, 4))
        first[...] = id
        second = empty(out, (3, 4))
        second[...] = 100 + id
        if what == "swapped":
            return second, first, id
        return (first, second, float(id)) if what == "other" else (first, second, id)


@settings(max_examples=15)
@given(st.dictionaries(st.integers(0, COUNT - 1), st.sampled_from(["fails", "other", "swapped"]), max_size=4))
def test_samples_that_are_left_out_or_of_another_form(odd: dict[int, str]) -> None:
    step = Named({})
    with reading(Pictures(picture, step)) as reader:
        buffer, memory = make_buffer(reader, COUNT)
        step.odd = odd
        samples = reader.finish(reader.start(np.arange(COUNT)), 0, 0, skip=True, buffer=buffer)
        wanted = reader.finish(reader.start(np.arange(COUNT)), 0, 0, skip=True)
        assert samples.ids == wanted.ids
        assert [str(error) for error in samples.skipped] == [str(error) for error in wanted.skipped]
        assert buffer.whole == (not {"fails", "other"} & set(odd.values()))
        if buffer.whole:
            found = list(zip(*(column.tolist() for column in read_record(memory, copy=True)), strict=True))
        else:
            memory[:] = 255  # it is written again
            found = [(a.tolist(), b.tolist(), c) for a, b, c in samples.values]
        assert found == [(a.tolist(), b.tolist(), c) for a, b, c in wanted.values]


def test_a_step_of_the_user_may_keep_what_it_was_given() -> None:
    kept: dict[int, Any] = {}

    def keep(sample: Any) -> Any:
        kept[sample[1]] = sample[0]
        return sample

    source = Pictures(picture, *on_picture(sf.vision.RandomResizedCrop(SIDE)), sf.mark_random(keep))
    with sf.CachedDataset(source, capacity="4MiB") as cached, sf.DataLoader(cached, batch_size=3) as loader:
        for _ in range(3):
            kept.clear()
            pairs = [pair for batch in loader for pair in zip(*batch, strict=True)]
            seen = {int(label): picture.clone() for picture, label in pairs}
            assert len(kept) == COUNT
            assert all((kept[id] == seen[id].numpy()).all() for id in seen)


# -- batches composed in place equal those of torch's `default_collate` ------------------------------------------------

DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "bool"]

scalars = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(max_size=3),
    st.binary(max_size=3),
)


@st.composite
def array(draw: st.DrawFn) -> Any:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    values = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(dtype)
    return torch.from_numpy(values) if draw(st.booleans()) else values


values = st.recursive(
    st.one_of(scalars, array()),
    lambda children: st.one_of(
        st.lists(children, min_size=1, max_size=3),
        st.tuples(children, children),
        st.builds(Point, children, children),
        st.dictionaries(st.text(max_size=2), children, min_size=1, max_size=3),
    ),
    max_leaves=5,
)


class Memory:
    """Memory for one batch."""

    def __init__(self) -> None:
        self.bytes: Bytes = np.empty(0, np.uint8)

    def reserve(self, size: int) -> Bytes:
        self.bytes = np.full(size + 13, 0xAB, np.uint8)
        return self.bytes


def outcome(call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error)


@settings(max_examples=25)
@given(
    st.one_of(
        st.lists(values, min_size=1, max_size=4), st.integers(1, 4).flatmap(lambda n: values.map(lambda v: [v] * n))
    )
)
def test_stacking_gives_what_torch_gives(samples: list[Any]) -> None:
    memory = Memory()
    used, _ = stack(samples, memory.reserve)
    expected = outcome(lambda: default_collate(samples))
    if used:
        assert same(read_record(memory.bytes, copy=True), expected)
    else:
        assert same(outcome(lambda: collate_default(samples)), expected)


def test_a_collation_that_does_not_stack_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        torch.utils.data._utils.collate.default_collate_fn_map,
        torch.Tensor,
        lambda batch, **_: torch.stack(list(reversed(batch))),
    )
    sample, _ = encode(torch.zeros(4, 1, 5))
    assert batch_structure(sample, 3) is None


def test_torch_takes_no_shared_memory_of_its_own_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    info = torch_worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch_worker, "_worker_info", info)
    assert not collate_default([torch.zeros(3)]).is_shared()
    assert torch.utils.data.get_worker_info() is info
