"""`CachedDataset`: what a sample is, whichever way it came."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from cached_data import Given, Numbers, as_plain, doubled_in_place, shifted_in_place, with_draws
from loader_data import Made, Pair
from unseen import unseen_ids

FEW = 160_000  # bytes: some of the samples fit, and some do not


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("form", ["fetched", "prepared"])
def test_a_hit_is_what_a_miss_was(form: str, store: str, tmp_path: Path) -> None:
    records = [
        (np.arange(6, dtype=np.uint8).reshape(2, 3), 7), {"image": torch.arange(4.0), "name": "ü", "none": None},
        [b"", "", 0, False, 0.0], Pair(np.float32(2.5), (1 << 90, -1)), None, 0, "",
        {"set": {1, 2}, "range": range(3)}, torch.arange(6).reshape(2, 3).t(), np.array(["a", "bc"]),
    ]  # fmt: skip
    source = Given(records, [sf.mark_deterministic(wrapped)])
    where = tmp_path if store == "disk" else store
    with sf.CachedDataset(source, capacity="1MiB", store=where, form=form) as data:
        assert data.form == form
        missed = [as_plain(data[id]) for id in range(len(records))]
        hit = [as_plain(data[id]) for id in range(len(records))]
        together = [as_plain(sample) for sample in data.__getitems__(list(range(len(records))))]
        assert data.stats().misses == len(unseen_ids(len(records)))  # the others were stored at the start
    assert missed == hit == together == [as_plain(wrapped(record)) for record in records]


def wrapped(record: Any) -> Any:
    return {"it": record}


@pytest.mark.parametrize("form", ["fetched", "prepared"])
@pytest.mark.parametrize("capacity", ["1MiB", FEW])
def test_who_changes_a_sample_changes_nobody_elses(form: str, capacity: str | int) -> None:
    source = Numbers(16, [doubled_in_place, shifted_in_place], size=2048)
    with sf.CachedDataset(source, capacity=capacity, form=form) as data:
        data.set_epoch(3)
        first = [[array.tolist() for array, _ in data.__getitems__(list(range(16)))] for _ in range(3)]
        for array, _ in data.__getitems__(list(range(16))):
            array[...] = -1
        assert [array.tolist() for array, _ in data.__getitems__(list(range(16)))] == first[0]
        assert first[0] == first[1] == first[2]
        twins = [array for array, _ in data.__getitems__([5, 5, 15, 15])]
        assert [twin.tolist() for twin in twins] == [first[0][5]] * 2 + [first[0][15]] * 2
    assert all((record == id).all() for id, record in enumerate(source.records))


def test_a_sample_twice_in_one_batch_is_fetched_once_and_given_twice() -> None:
    source = Given([(np.full(4, id), id) for id in range(24)], [doubled_in_place])
    twice, once, *others = unseen_ids(24)
    with sf.CachedDataset(source, capacity="1MiB", form="prepared") as data:
        one, two, other = (sample[0] for sample in data.__getitems__([twice, twice, once]))
        one[...] = -1
        assert (two.tolist(), other.tolist()) == ([2 * twice] * 4, [2 * once] * 4)
        assert sorted(source.fetched) == sorted([twice, once])
        assert data.stats().storage_reads == 24 - len(others)
        assert data[twice][0].tolist() == [2 * twice] * 4


def test_ids_count_from_the_end_and_must_be_in_range() -> None:
    with sf.CachedDataset(Numbers(5), capacity="1MiB") as data:
        assert len(data) == 5
        assert [label for _, label in data.__getitems__([-1, -5, 4, 0])] == [4, 0, 4, 0]
        assert data[np.int64(3)][1] == data[torch.tensor(3)][1] == 3
        assert [label for _, label in data] == [0, 1, 2, 3, 4]
        assert data.__getitems__([]) == []
        for id in (5, -6):
            with pytest.raises(IndexError, match=f"id {id} is out of range: the data set has 5 samples"):
                data[id]
        for wrong in (1.5, "1", None):
            with pytest.raises(TypeError):
                data[wrong]


def test_randomness_is_fresh_with_every_visit_and_a_function_of_the_epoch() -> None:
    def draws(data: sf.CachedDataset) -> list[Any]:
        return [data[id][2:] for id in range(8)]

    with sf.CachedDataset(Numbers(8, [with_draws]), capacity="1MiB") as data:
        visits = [draws(data) for _ in range(3)]
        data.set_epoch(1)
        assert draws(data) == draws(data) == visits[1]
        data.set_epoch(0)
        assert draws(data) == visits[0]
    assert len({sample for visit in visits for sample in visit}) == 24
    with sf.CachedDataset(Numbers(8, [with_draws]), capacity="1MiB", seed=1) as data:
        assert not {sample for visit in visits for sample in visit} & set(draws(data))


def test_a_sample_that_cannot_be_stored_is_an_error_with_its_id() -> None:
    with sf.CachedDataset(Given([1, 2, lambda: None, 4]), capacity="1MiB") as data:
        with pytest.raises(sf.CodecError, match=r"storing sample 2 \(given/2\)"):
            data.__getitems__([1, 2, 3])
        assert data.cache.resident([0, 1, 2, 3]).tolist() == [True, True, False, True]


def test_an_error_in_the_row_of_a_batch_is_raised_with_its_sample() -> None:
    pictures, bad = [np.full((9, 9, 3), id, np.uint8) for id in range(24)], unseen_ids(24)[-1]
    pictures[bad] = np.zeros(4, np.uint8)
    source, error = Given(pictures, [sf.vision.RandomResizedCrop(4)]), f"preparing sample {bad} "
    with sf.CachedDataset(source, capacity="1MiB") as data, pytest.raises(sf.InputError, match=error):
        list(sf.DataLoader(data, batch_size=4))


def test_a_data_set_that_has_grown_needs_a_new_cache() -> None:
    data = list(range(12))
    with sf.CachedDataset(data, capacity="1MiB") as cached, sf.DataLoader(cached, batch_size=12) as loader:
        assert len(list(loader)) == 1
        data.append(12)
        error = pytest.raises(IndexError, match="ids 0 to 11: if it has grown, make a new cache")
        with pytest.warns(UserWarning, match="is not what it was"), error:
            list(sf.DataLoader(cached, batch_size=13))


@pytest.mark.filterwarnings("error::stallfree.StallfreeWarning")
def test_bytes_between_the_fields_of_an_array_are_no_setting() -> None:
    data = Given(list(range(40)))
    data.boxes = np.zeros(40, np.dtype([("x", "u1"), ("y", "<f4")], align=True))
    with sf.CachedDataset(data, capacity="1MiB") as cached, sf.DataLoader(cached, batch_size=8) as loader:
        for value in range(4):
            used = [np.full(size, value, np.uint8) for size in (16, 32, 64, 128, 320, 640)]
            del used  # copies get this memory
            list(loader)


def test_a_sample_that_contains_itself_is_refused_by_name() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    with pytest.raises(sf.CodecError, match="contains itself"):
        sf.CachedDataset(sf.mark_deterministic(Made(9, lambda id: cyclic)), capacity="1MiB")


@sf.mark_random
def one_more(value: Any) -> Any:
    value += 1
    return value


def test_a_missing_sample_that_comes_several_times_in_a_batch_is_several_objects() -> None:
    rows = [np.full(3, 10 * id) for id in range(4)]
    with sf.CachedDataset(rows, capacity="1MiB", transform=one_more) as cached:
        assert next(iter(sf.DataLoader(cached, 4, sampler=[1, 1, 2, 1])))[:, 0].tolist() == [11, 11, 21, 11]
