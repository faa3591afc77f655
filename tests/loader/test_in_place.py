"""Samples prepared in the rows of their batch, directly from the cache."""

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker

import stallfree as sf
from loader_data import Made, Point, same
from stallfree.loader.collate import batch_structure, collate_default, stack
from stallfree.pipeline.codec import encode, read_record
from stallfree.pipeline.compose import OnItem, empty, in_place

COUNT, SIDE = 12, 24
HALF = COUNT // 2
"""Samples of a batch: the first one of an epoch shows their structure, and the second one is made in place."""


def picture(id: int) -> np.ndarray[Any, Any]:
    """Bytes whose size and content are a function of the id."""
    shape = 30 + 3 * id, 60 - 2 * id, 3
    return (np.arange(np.prod(shape)).reshape(shape) * 40503 * (id + 1) >> 6).astype(np.uint8)


def encoded(id: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture(id)).save(file, "JPEG")
    return file.getvalue()


def caching(make: Callable[[int], Any], *steps: Any, **options: Any) -> sf.CachedDataset[Any]:
    """A cached data set of pairs of a picture and a label, to which `steps` are applied."""
    data = Made(COUNT, lambda id: (make(id), id))
    return sf.CachedDataset(data, capacity="8MiB", transform=sf.Compose(list(steps)), **options)


def on_picture(*steps: Any) -> list[Any]:
    return [OnItem(0, step) for step in steps]


@in_place
@sf.mark_random
@dataclass
class Flip:
    """Mirrors with probability `p`, in the row itself if that is where the picture is."""

    p: float = 0.5

    def __call__(self, pixels: Any, out: Any = None) -> Any:
        if random.random() >= self.p:
            return pixels
        mirrored = empty(out, pixels.shape)
        mirrored[...] = pixels[:, ::-1].copy()
        return mirrored


@in_place
@sf.mark_deterministic
class ChannelsFirst:
    def __call__(self, pixels: Any, out: Any = None) -> Any:
        moved = empty(out, (3, *pixels.shape[:2]))
        moved[...] = pixels.transpose(2, 0, 1).copy()
        return moved


LAST = sf.vision.RandomResizedCrop(SIDE, flip=0.5)
OTHERS = [Flip(), sf.vision.RandomResizedCrop((40, 30))]


@settings(max_examples=5)
@given(
    before=st.lists(st.sampled_from(OTHERS), max_size=3), after=st.lists(st.just(Flip()), max_size=3),
    end=st.lists(st.just(ChannelsFirst()), max_size=1), form=st.sampled_from(["fetched", "prepared"]),
)  # fmt: skip
def test_batches_are_those_that_torch_makes_of_the_samples(
    before: list[Any], after: list[Any], end: list[Any], form: Any
) -> None:
    steps = on_picture(sf.DecodeImage(), Flip(), *before, LAST, *after, *end)
    with caching(encoded, *steps, form=form, seed=3) as cached:
        assert cached.reader.in_place
        loader = sf.DataLoader(cached, batch_size=5, shuffle=True, seed=3)
        for epoch in range(2):
            cached.set_epoch(epoch)
            for batch in loader:
                assert same(batch, default_collate([cached[id] for id in batch[1].tolist()]))


def test_results_are_rows_and_nothing_is_copied_out_of_the_cache() -> None:
    seen = []

    @in_place
    class Look:
        def __call__(self, pixels: Any, out: Any = None) -> Any:
            seen.append(pixels)
            return pixels

    steps = on_picture(sf.mark_random(Look()), sf.vision.RandomResizedCrop(SIDE), Look())
    with caching(picture, *steps, form="fetched") as cached, sf.DataLoader(cached, HALF) as loader:
        list(loader)
        seen.clear()
        _, (pictures, _) = loader
        assert len(seen) == 2 * COUNT
        for before, after in zip(seen[COUNT::2], seen[COUNT + 1 :: 2], strict=True):
            assert np.shares_memory(after, pictures.numpy())
            assert not before.flags.owndata
        del seen[:], before, after


def test_what_is_changed_while_it_is_read_comes_from_the_source() -> None:
    disturbed: list[Any] = []

    @in_place
    class Disturbed:
        """Once, another process replaces the record of sample 8 while it is read."""

        def __call__(self, sample: Any, out: Any = None) -> Any:
            pixels, id = sample
            part = empty(out, (2, 2, 3))
            if id == 8 and disturbed:
                cache = disturbed.pop()
                cache.drop([8])
                cache.put_many([8], [(np.zeros_like(pixels), 77)])
                pixels = np.full_like(pixels, 9)  # as it would look by now
            part[...] = pixels[:2, :2]
            return part, id

    with caching(picture, sf.mark_random(Disturbed())) as cached, sf.DataLoader(cached, HALF) as loader:
        list(loader)
        disturbed.append(cached.cache)
        before, counted = cached.stats(), loader.stats()
        _, (pictures, labels) = loader
        assert labels.tolist() == list(range(HALF, COUNT))
        assert [part[0, 0, 0] for part in pictures] == [picture(id)[0, 0, 0] for id in range(HALF, COUNT)]
        after, now = cached.stats(), loader.stats()
        assert (now.hits - counted.hits, now.misses - counted.misses) == (COUNT - 1, 1)
        assert (after.hits - before.hits, after.misses - before.misses) == (COUNT - 1, 1)
        assert after.storage_reads - before.storage_reads == 1


@in_place
@sf.mark_random
@dataclass
class Named:
    """Raises, or returns another structure, for some labels."""

    odd: dict[int, str]

    def __call__(self, sample: Any, out: Any = None) -> Any:
        _, id = sample
        what = self.odd.get(id, "")
        if what == "fails":
            raise ValueError("cannot be seen")
        first, second = (empty(out, (3, 4)) for _ in range(2))
        first[...], second[...] = id, 100 + id
        if what == "swapped":
            return second, first, id
        return (first, second, float(id)) if what == "other" else (first, second, id)


@settings(max_examples=5)
@example({6: "fails", 8: "other", 9: "swapped"})
@given(st.dictionaries(st.integers(HALF, COUNT - 1), st.sampled_from(["fails", "other", "swapped"]), max_size=4))
def test_samples_that_are_left_out_or_of_another_form(odd: dict[int, str]) -> None:
    step, failed = Named(odd), [id for id, what in odd.items() if what == "fails"]
    with caching(picture, step) as cached, sf.DataLoader(cached, HALF, on_error="skip") as loader:
        batches = list(loader)
        left = [id for id in range(HALF, COUNT) if id not in failed]
        assert same(batches[1:], [default_collate([step((None, id)) for id in left])] if left else [])
        assert loader.stats().skips == len(failed)


def test_a_step_of_the_user_may_keep_what_it_was_given() -> None:
    kept: dict[int, Any] = {}

    def keep(sample: Any) -> Any:
        kept[sample[1]] = sample[0]
        return sample

    steps = [*on_picture(sf.vision.RandomResizedCrop(SIDE)), sf.mark_random(keep)]
    with caching(picture, *steps) as cached, sf.DataLoader(cached, batch_size=3) as loader:
        for _ in range(3):
            kept.clear()
            pairs = [pair for batch in loader for pair in zip(*batch, strict=True)]
            seen = {int(label): picture.clone() for picture, label in pairs}
            assert len(kept) == COUNT
            assert all((kept[id] == seen[id].numpy()).all() for id in seen)


DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "bool"]

numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans())


@st.composite
def array(draw: st.DrawFn) -> Any:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    values = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(dtype)
    return torch.from_numpy(values) if draw(st.booleans()) else values


values = st.recursive(
    st.one_of(numbers, st.text(max_size=3), st.binary(max_size=3), array()),
    lambda children: st.one_of(
        st.lists(children, min_size=1, max_size=3),
        st.tuples(children, children),
        st.builds(Point, children, children),
        st.dictionaries(st.text(max_size=2), children, min_size=1, max_size=3),
    ),
    max_leaves=5,
)
alike = st.integers(1, 4).flatmap(lambda n: values.map(lambda v: [v] * n))


def outcome(call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error)


@settings(max_examples=25)
@given(st.one_of(st.lists(values, min_size=1, max_size=4), alike))
def test_stacking_gives_what_torch_gives(samples: list[Any]) -> None:
    memory = np.full(1 << 20, 0xAB, np.uint8)
    used, _ = stack(samples, lambda size: memory)
    expected = outcome(lambda: default_collate(samples))
    if used:
        assert same(read_record(memory, copy=True), expected)
    else:
        assert same(outcome(lambda: collate_default(samples)), expected)


def test_a_collation_that_does_not_stack_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = torch.utils.data._utils.collate.default_collate_fn_map
    monkeypatch.setitem(kinds, torch.Tensor, lambda batch, **_: torch.stack(list(reversed(batch))))
    sample, _ = encode(torch.zeros(4, 1, 5))
    assert batch_structure(sample, 3) is None


def test_torch_takes_no_shared_memory_of_its_own_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    info = torch_worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch_worker, "_worker_info", info)
    assert not collate_default([torch.zeros(3)]).is_shared()
    assert torch.utils.data.get_worker_info() is info


def test_a_sample_of_another_form_leaves_the_order_of_its_batch() -> None:
    step = OnItem(0, sf.vision.RandomResizedCrop(8))
    data = Made(12, lambda id: (np.full((20, 20, 3), id, np.uint8), float(id) if id == 8 else id))
    with sf.CachedDataset(data, capacity="4MiB", transform=step) as cached:
        _, labels = list(sf.DataLoader(cached, 6))[1]
    assert labels.tolist() == list(range(6, 12))
