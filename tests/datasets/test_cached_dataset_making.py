"""Making a `CachedDataset`: the first look at the data, the form, the fingerprint, bad arguments."""

import random
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset

import stallfree as sf
from cached_data import Given, Numbers, Plain, doubled, tripled, widened, with_draws
from loader_data import same
from stallfree.testing import ThrottledSource

# -- the form ---------------------------------------------------------------------------------------------------------


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
    with sf.CachedDataset(Numbers(4, [sf.mark_deterministic(lazily)]), capacity="1MiB") as data:
        assert data.form == "fetched"
        assert "prepared they cannot be stored" in data.decision
        assert [sample()[1] for sample in data] == [0, 1, 2, 3]


def lazily(sample: Any) -> Any:
    return lambda: sample


# -- the first look ---------------------------------------------------------------------------------------------------


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
    "entropy": lambda id: np.random.default_rng().random(),
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


# -- the fingerprint and the name -------------------------------------------------------------------------------------


def key_of(dataset: Any, **options: Any) -> str:
    with sf.CachedDataset(dataset, capacity="1MiB", **options) as data:
        return data.cache.meta.fingerprint


def test_whatever_changes_a_cached_sample_changes_the_key() -> None:
    keys = [
        key_of(Numbers(8)),
        key_of(Numbers(9)),
        key_of(Numbers(8, [doubled])),
        key_of(Numbers(8, [tripled])),
        key_of(Numbers(8), transform=widened),
        key_of(ConcatDataset([Numbers(8, [doubled])])),
        key_of(ConcatDataset([Numbers(8, [tripled])])),
        key_of(Plain(8)),
        key_of(Plain(8, halved)),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(Numbers(8, [doubled, with_draws])) == keys[2]
