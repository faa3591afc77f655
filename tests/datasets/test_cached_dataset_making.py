"""Making a `CachedDataset`: the first look at the data, the form, the fingerprint, bad arguments."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset

import stallfree as sf
from cached_data import Given, Numbers, Plain, doubled, shifted_in_place, tripled, widened, with_draws
from loader_data import same
from stallfree.testing import ThrottledSource
from unseen import unseen_ids

# -- the form ---------------------------------------------------------------------------------------------------------


def test_auto_keeps_the_fetched_form_when_prepared_not_all_fit(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "stallfree"),
        sf.CachedDataset(Numbers(64, [widened], size=32), capacity="256KiB") as data,
    ):
        assert data.form == "fetched"
        for said in ("as fetched", "prepared they take about 260", "(not all fit)", "(all fit)", "there are 256"):
            assert said in data.decision
        assert data.decision in caplog.messages
        list(data)
        assert data.stats().resident_items == 64


def test_auto_prepares_exactly_from_the_capacity_on_where_all_fit() -> None:
    forms = []
    for capacity in range(290_000, 400_000, 36_000):
        with sf.CachedDataset(Numbers(64, [widened], size=32), capacity=capacity) as data:
            list(data)
            assert data.stats().rejected == 0
            forms.append(data.form)
        with sf.CachedDataset(Numbers(64, [widened], size=32), capacity=capacity, form="prepared") as data:
            list(data)
            assert (data.stats().rejected == 0) == (forms[-1] == "prepared")
    assert {"fetched", "prepared"} == set(forms)


def test_auto_prepares_what_becomes_smaller_even_if_not_all_fit() -> None:
    with sf.CachedDataset(Numbers(64, [thinned], size=4096), capacity="160KiB") as data:
        assert data.form == "prepared"


def thinned(sample: Any) -> Any:
    return sample[0][::2].copy(), sample[1]


def test_auto_does_not_choose_a_form_that_cannot_be_stored() -> None:
    with sf.CachedDataset(Numbers(4, [sf.mark_deterministic(lazily)]), capacity="1MiB") as data:
        assert data.form == "fetched"
        assert "prepared they cannot be stored" in data.decision
        assert [sample()[1] for sample in data] == [0, 1, 2, 3]


def lazily(sample: Any) -> Any:
    return lambda: sample


@pytest.mark.parametrize("spread", [1, 7])
def test_samples_of_varied_size_use_all_of_the_capacity(spread: int) -> None:
    source = Numbers(32, size=64, spread=spread)
    source.records[3] = np.zeros(4096, np.int64)
    source.records[-1] = np.zeros(300, np.int64)
    with sf.CachedDataset(source, capacity="256KiB") as data:
        list(data)
        assert data.stats().resident_items == 32


# -- the first look ---------------------------------------------------------------------------------------------------


def test_what_the_first_look_reads_is_not_read_again() -> None:
    records = [bytes([97 + id]) for id in range(20)]
    source = ThrottledSource(Given(records, [sf.mark_deterministic(bytes.upper)]))
    looked = 20 - len(unseen_ids(20))
    assert 2 < looked <= 8
    with sf.CachedDataset(source, capacity="1MiB") as data:
        assert (data.stats().storage_reads, data.stats().storage_bytes, source.requests) == (looked,) * 3
        assert list(data) == list(data) == [record.upper() for record in records]
        assert (data.stats().storage_reads, data.stats().storage_bytes, source.requests) == (20, 20, 20)
    source.close()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for place in range(8):
        path = tmp_path / "pictures" / "ab"[place % 2] / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (8, 12, 3), np.uint8)).save(path)
    return tmp_path / "pictures"


def halved(picture: Any) -> Any:
    return picture[::2]


@pytest.mark.parametrize("step", [np.sqrt, lambda value: value + 1])
def test_first_records_that_no_step_takes(step: Any) -> None:
    with sf.CachedDataset(Given([OSError("bad"), "text", 1, 2], [step]), capacity="1MiB") as data:
        assert data[3] == step(2)
        with pytest.raises(OSError, match=r"bad\n.*fetching sample 0 \(given/0\)"):
            data[0]
    with pytest.raises(TypeError, match=r"preparing sample 0 \(given/0\)"):
        sf.CachedDataset(Given(["text"] * 5, [step]), capacity="1MiB")
    with pytest.raises(KeyError, match=r"fetching sample 0 \(given/0\)"):
        sf.CachedDataset(Given([KeyError("x"), *["text"] * 4], [step]), capacity="1MiB")


def test_a_step_that_cannot_be_judged_warns_once_at_the_callers_line() -> None:
    with pytest.warns(sf.StallfreeWarning, match="cannot tell whether the transform .*Handle") as caught:
        data = sf.CachedDataset(Numbers(3, [Handle]), capacity="1MiB")
    data.close()
    assert [warning.filename for warning in caught] == [__file__]


class Opaque:
    """What cannot be compared."""

    __slots__ = ()

    def __init__(self, sample: Any) -> None:
        pass


# -- plain data sets with random samples ------------------------------------------------------------------------------


class Own(Dataset[Any]):
    """Gives what `sample(id)` gives."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 4

    def __getitem__(self, id: int) -> Any:
        return self.sample(id)


class Counting:
    """Another value at each call, without any generator."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, id: int) -> int:
        self.calls += 1
        return self.calls


RANDOM = {
    "global": lambda id: (id, random.random()),
    "torch": lambda id: torch.rand(3),
    "entropy": lambda id: np.random.default_rng().random(),
    "coin": lambda id: np.random.default_rng().integers(4),
    "system": lambda id: os.urandom(8),
    "counter": Counting(),
    "unused draw": lambda id: [id, random.random()][0],
}


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        *((kind, lambda data: data) for kind in RANDOM),
        ("global", ThrottledSource),
        ("counter", lambda data: Subset(data, [1, 2])),
    ],
)
def test_a_plain_data_set_with_random_samples_is_refused(kind: str, wrap: Any) -> None:
    before = random.getstate()
    with pytest.raises(sf.InputError, match=r"(gives|may give) random samples: .*transform=\.\.\."):
        sf.CachedDataset(wrap(Own(RANDOM[kind])), capacity="1MiB")
    assert random.getstate() == before


@pytest.mark.parametrize(
    "sample",
    [
        lambda id: None,
        lambda id: float("nan"),
        lambda id: {"set": {id}, "image": Image.new("L", (2, 2), id)},
    ],
)
def test_a_plain_data_set_with_steady_samples_is_taken(sample: Any) -> None:
    with sf.CachedDataset(Own(sample), capacity="1MiB") as data:
        for _ in range(2):
            for id in range(4):
                assert same(data[id], sample(id))


def test_a_mark_has_the_last_word_on_a_plain_data_set() -> None:
    with sf.CachedDataset(sf.mark_deterministic(Own(RANDOM["global"])), capacity="1MiB") as data:
        assert data[1] == data[1]
    with pytest.raises(sf.InputError, match="Own is marked as random"):
        sf.CachedDataset(sf.mark_random(Own(str)), capacity="1MiB")


@pytest.mark.parametrize(
    "sample",
    [
        lambda id: np.random.default_rng(id).random(3),
        lambda id: torch.rand(3, generator=torch.Generator().manual_seed(id)),
        lambda id: random.Random(id).random(),
    ],
)
def test_names_of_generators_count_as_random_until_the_user_marks_the_data_set(sample: Any) -> None:
    with pytest.raises(sf.InputError, match=r"may give random samples: .*mark_deterministic"):
        sf.CachedDataset(Own(sample), capacity="1MiB")
    with sf.CachedDataset(sf.mark_deterministic(Own(sample)), capacity="1MiB") as data:
        assert all(same(data[id], sample(id)) for id in range(4))


def test_samples_that_cannot_be_compared_are_refused_with_advice() -> None:
    with pytest.raises(
        sf.InputError, match=r"Own may give random samples: .*Handle.* sample 0.*mark_deterministic\(dataset"
    ):
        sf.CachedDataset(Own(Handle), capacity="1MiB")


class Handle(Opaque):
    """Neither comparable nor picklable."""

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def test_random_steps_of_a_source_within_a_plain_wrapper_are_found() -> None:
    for steps in ([shifted_in_place], [doubled, with_draws]):
        with pytest.raises(sf.InputError, match=r"ConcatDataset gives random samples: it drew .*sample 0"):
            sf.CachedDataset(ConcatDataset([Numbers(4, steps)]), capacity="1MiB")
    with pytest.raises(sf.InputError, match=r"ConcatDataset gives random samples: it drew .*sample (8|9|1[01])"):
        sf.CachedDataset(ConcatDataset([Numbers(4), Plain(4), Numbers(4, [with_draws])]), capacity="1MiB")


@pytest.mark.parametrize("record", [with_draws, shifted_in_place])
def test_a_source_whose_fetch_draws_is_refused(record: Any) -> None:
    class Drawing(Numbers):
        def _record(self, id: int) -> Any:
            return record(super()._record(id))

    with pytest.raises(sf.InputError, match="Drawing gives random samples: it drew random numbers at sample 0"):
        sf.CachedDataset(Drawing(), capacity="1MiB")
    with sf.CachedDataset(sf.mark_deterministic(Drawing()), capacity="1MiB") as data:
        assert same(data[3], data[3])


# -- the fingerprint and the name -------------------------------------------------------------------------------------


def key_of(dataset: Any, **options: Any) -> str:
    with sf.CachedDataset(dataset, capacity="1MiB", **options) as data:
        return data.cache.meta.fingerprint


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, sample: Any) -> Any:
        return sample[0] * self.factor, sample[1]


def test_whatever_changes_a_cached_sample_changes_the_key() -> None:
    keys = [
        key_of(Numbers(8)),
        key_of(Numbers(9)),
        key_of(Numbers(8, [doubled])),
        key_of(Numbers(8, [tripled])),
        key_of(Numbers(8, [Scaled(1.5)])),
        key_of(Numbers(8, [Scaled(2.5)])),
        key_of(Numbers(8), transform=Scaled(3.5)),
        key_of(ConcatDataset([Numbers(8, [doubled])])),
        key_of(ConcatDataset([Numbers(8, [tripled])])),
        key_of(Plain(8)),
        key_of(Plain(8, halved)),
    ]
    assert len(set(keys)) == len(keys)


def test_what_is_not_cached_does_not_change_the_key() -> None:
    assert key_of(Numbers(8, [doubled, with_draws])) == key_of(Numbers(8, [doubled]))
    assert key_of(Numbers(8, [doubled]), form="fetched") == key_of(Numbers(8, [tripled]), form="fetched")
    assert key_of(Numbers(8), transform=doubled) == key_of(Numbers(8, [doubled]))
    assert key_of(Numbers(8, [with_draws]), seed=1) == key_of(Numbers(8, [with_draws]), seed=2)


def test_a_name_belongs_to_one_kind_of_data(store_root: Path) -> None:
    with sf.CachedDataset(Numbers(8, [doubled]), capacity="1MiB", name="mine") as data:
        for other, options in (
            (Numbers(8, [tripled]), {}),
            (Numbers(9), {}),
            (Numbers(8, [doubled]), {"policy": "lru"}),
        ):
            with pytest.raises(sf.FingerprintError, match=r"'mine'.*Give another name.*stallfree cache rm mine"):
                sf.CachedDataset(other, capacity="1MiB", name="mine", **options)
        with sf.CachedDataset(Numbers(8, [doubled, with_draws]), capacity="1MiB", name="mine") as same:
            assert same.cache.path == data.cache.path
    assert not list(store_root.iterdir())


# -- bad arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"capacity": -1}, sf.CapacityError, "-1"),
        ({"capacity": "much"}, sf.CapacityError, "much"),
        ({"capacity": "900TiB"}, sf.CapacityError, "of free memory"),
        ({"capacity": 100}, sf.CapacityError, "holds no record"),
        ({"form": "baked"}, sf.InputError, "'baked'"),
        ({"policy": "best"}, sf.InputError, "'best'"),
        ({"name": "../up"}, sf.InputError, "'../up'"),
        ({"name": ""}, sf.InputError, "name=''"),
        ({"transform": 3}, sf.InputError, "cannot be called"),
    ],
)
def test_arguments_that_cannot_be_used(
    options: dict[str, Any], error: type[Exception], said: str, store_root: Path
) -> None:
    with pytest.raises(error, match=said.replace(".", r"\.")):
        sf.CachedDataset(Numbers(4), **{"capacity": "1MiB"} | options)
    assert not list(store_root.iterdir())


def test_data_sets_that_cannot_be_used() -> None:
    with pytest.raises(sf.InputError, match="length 0"):
        sf.CachedDataset([], capacity="1MiB")
    with pytest.raises(sf.InputError, match="map-style"):
        sf.CachedDataset(iter([1]), capacity="1MiB")
