"""Making a `CachedDataset`: the first look at the data, the form, the fingerprint, bad arguments."""

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import ConcatDataset, Subset

import stallfree as sf
from cached_data import Given, Numbers, Plain, doubled, tripled, widened, with_draws
from loader_data import Made, same
from stallfree.testing import ThrottledSource


def test_auto_prepares_exactly_from_the_capacity_on_where_all_fit() -> None:
    forms = []
    for capacity in (290_000, 340_000, 390_000):
        with sf.CachedDataset(Numbers(64, [widened], size=32), capacity=capacity) as data:
            list(data)
            assert data.stats().rejected == 0
            forms.append(data.form)
        with sf.CachedDataset(Numbers(64, [widened], size=32), capacity=capacity, form="prepared") as data:
            list(data)
            assert (data.stats().rejected == 0) == (forms[-1] == "prepared")
    assert {"fetched", "prepared"} == set(forms)


def test_auto_does_not_choose_a_form_that_cannot_be_stored() -> None:
    lazily = sf.mark_deterministic(lambda sample: lambda: sample)
    with sf.CachedDataset(Numbers(4, [lazily]), capacity="1MiB") as data:
        assert data.form == "fetched"
        assert "prepared they cannot be stored" in data.decision
        assert [sample()[1] for sample in data] == [0, 1, 2, 3]


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


CALLS = count()
RANDOM: dict[str, Callable[[int], Any]] = {
    "global": lambda id: (id, random.random()), "entropy": lambda id: np.random.default_rng().random(),
    "counter": lambda id: next(CALLS), "unused draw": lambda id: [id, random.random()][0],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "wrap"), [
    *((kind, lambda data: data) for kind in RANDOM), ("global", ThrottledSource),
    ("counter", lambda data: Subset(data, [1, 2])),
])  # fmt: skip
def test_a_plain_data_set_with_random_samples_is_refused(kind: str, wrap: Any) -> None:
    before = random.getstate()
    with pytest.raises(sf.InputError, match=r"(gives|may give) random samples: .*transform=\.\.\."):
        sf.CachedDataset(wrap(Made(4, RANDOM[kind])), capacity="1MiB")
    assert random.getstate() == before


@pytest.mark.parametrize(
    "sample", [lambda id: None, lambda id: float("nan"), lambda id: {"set": {id}, "image": Image.new("L", (2, 2), id)}]
)
def test_a_plain_data_set_with_steady_samples_is_taken(sample: Any) -> None:
    with sf.CachedDataset(Made(4, sample), capacity="1MiB") as data:
        for _ in range(2):
            for id in range(4):
                assert same(data[id], sample(id))


def test_a_mark_has_the_last_word_on_a_plain_data_set() -> None:
    with sf.CachedDataset(sf.mark_deterministic(Made(4, RANDOM["global"])), capacity="1MiB") as data:
        assert data[1] == data[1]
    with pytest.raises(sf.InputError, match="Made is marked as random"):
        sf.CachedDataset(sf.mark_random(Made(4, str)), capacity="1MiB")


def key_of(dataset: Any, **options: Any) -> str:
    with sf.CachedDataset(dataset, capacity="1MiB", **options) as data:
        return data.cache.meta.fingerprint


def test_whatever_changes_a_cached_sample_changes_the_key() -> None:
    keys = [
        key_of(Numbers(8)), key_of(Numbers(9)), key_of(Numbers(8, [doubled])), key_of(Numbers(8, [tripled])),
        key_of(Numbers(8), transform=widened), key_of(ConcatDataset([Numbers(8, [doubled])])),
        key_of(ConcatDataset([Numbers(8, [tripled])])), key_of(Plain(8)), key_of(Plain(8, np.sqrt)),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key_of(Numbers(8, [doubled, with_draws])) == keys[2]
