"""`cut`: data sets split at their own transforms, with the same samples; what cannot be split is refused."""

from __future__ import annotations

import collections
import copy
import pickle
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import albumentations
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset

import stallfree as sf
from loader_data import same
from stallfree.errors import InputError
from stallfree.pipeline.compose import OnItem, Source

COUNT = 20


class Base:
    """Arrays and labels; `get` makes a sample of the data set and the id."""

    def __init__(self, transform: Any = None, other: Any = None, get: Any = None) -> None:
        self.transform, self.other, self.get = transform, other, get

    def __len__(self) -> int:
        return COUNT

    def read(self, id: int) -> Any:
        return np.full((2, 3), id, np.int64)

    def __getitem__(self, id: int) -> Any:
        return (self.transform(self.read(id)), id) if self.get is None else self.get(self, id)


def noisy(value: Any) -> Any:
    return value + random.random()


def normal(value: Any) -> Any:
    return value + torch.randn(()).item() + np.random.rand()


def tripled(value: Any) -> Any:
    return value * 3


def crops(image: Any, shift: int) -> Any:
    return [image + random.random(), image + shift, image]


Pair = collections.namedtuple("Pair", "image label")


def on_label(data: Base, id: int) -> Any:
    return data.transform(data.read(id)), data.other(id)


def label_first(data: Base, id: int) -> Any:
    label = data.other(id)
    return data.transform(data.read(id)), label


def alone(data: Base, id: int) -> Any:
    return data.transform(data.read(id))


def nested(data: Base, id: int) -> Any:
    return {"image": [id, (data.transform(data.read(id)),)], "label": id}


def named(data: Base, id: int) -> Any:
    return Pair(data.transform(data.read(id)), id)


def each_crop(data: Base, id: int) -> Any:
    """Each item of an output goes through another transform."""
    return [data.other(crop) for crop in data.transform(data.read(id), 1)], id


def unused(data: Base, id: int) -> Any:
    data.transform(0)
    return data.other(data.read(id)), id


def in_two_places(data: Base, id: int) -> Any:
    image = data.transform(data.read(id))
    return image, image


FLAT: dict[str, tuple[Base, tuple[str, ...]]] = {
    "composed": (Base(sf.Compose([tripled, noisy, normal])), ("transform",)),
    "two": (Base(normal, noisy, on_label), ("transform", "other")),
    "one of two": (Base(normal, tripled, on_label), ("transform",)),
    "label first": (Base(normal, noisy, label_first), ("transform", "other")),
    "alone": (Base(noisy, get=alone), ("transform",)),
    "nested": (Base(noisy, get=nested), ("transform",)),
}
PLANNED: dict[str, tuple[Base, tuple[str, ...]]] = {
    "crops": (Base(crops, noisy, each_crop), ("transform", "other")),
    "named tuple": (Base(noisy, get=named), ("transform",)),
    "unused": (Base(noisy, noisy, unused), ("transform", "other")),
    "in two places": (Base(noisy, get=in_two_places), ("transform",)),
}


def seeded(dataset: Any, id: int) -> Any:
    random.seed(id)
    np.random.seed(id)
    torch.manual_seed(id)
    return dataset[id]


def agree(data: Source, dataset: Any) -> None:
    """Raise unless all samples of `data` are those of `dataset`, from equal states of the generators."""
    for id in range(len(dataset)):
        assert same(seeded(data, id), seeded(dataset, id)), id


@pytest.mark.parametrize("name", [*FLAT, *PLANNED])
def test_samples_are_the_same(name: str) -> None:
    dataset, attributes = (FLAT | PLANNED)[name]
    before = dict(vars(dataset))
    data = sf.cut(dataset, *attributes)
    assert isinstance(data, Source)
    assert len(data) == COUNT
    assert not data.threads
    agree(data, dataset)
    agree(pickle.loads(pickle.dumps(data)), dataset)
    assert vars(dataset) == before
    steps = all(type(step) is OnItem or step is noisy for step in data.pipeline)
    assert steps is (name in FLAT), "steps on places of a sample are classified one by one"


def test_fetch_gives_what_the_transform_is_called_with() -> None:
    data = sf.cut(Base(sf.Compose([tripled, noisy])), "transform")
    assert same(data.fetch(4), (np.full((2, 3), 4, np.int64), 4))
    assert [str(step) for step in data.pipeline] == ["OnItem(0, test_cut.tripled)", "OnItem(0, test_cut.noisy)"]


def test_albumentations() -> None:
    def read(id: int) -> Any:
        return (np.arange(192).reshape(8, 8, 3) * (2 * id + 7) % 251).astype(np.uint8)

    def one_image(data: Base, id: int) -> Any:
        return data.transform(image=read(id))["image"], id

    def with_mask(data: Base, id: int) -> Any:
        made = data.transform(image=read(id), mask=read(id)[..., 0])
        return made["image"], made["mask"]

    flips = albumentations.Compose([albumentations.HorizontalFlip(), albumentations.RandomCrop(4, 4)], seed=3)
    data = sf.cut(Base(flips, get=one_image), "transform")
    assert same(data.fetch(2), (read(2), 2))
    assert type(data.pipeline.transforms[0]) is OnItem
    masks = sf.cut(Base(flips, get=with_mask), "transform")
    image, mask = masks[1]
    assert image.shape == (4, 4, 3)
    assert np.array_equal(image[..., 0], mask)
    assert sf.split(masks.pipeline).verdicts[0].random


def test_files_that_are_closed_after_the_call(tmp_path: Path) -> None:
    for id in range(3):
        Image.fromarray(np.full((5, 4, 3), 10 * id, np.uint8)).save(tmp_path / f"{id}.png")

    def opened(data: Base, id: int) -> Any:
        with Image.open(tmp_path / f"{id % 3}.png") as image:
            return data.transform(image), id

    data = sf.cut(Base(np.asarray, get=opened), "transform")
    assert [data[id][0].max() for id in range(3)] == [0, 10, 20]


def test_buffers_that_are_used_again() -> None:
    buffer = np.zeros(2)

    def reused(data: Base, id: int) -> Any:
        buffer[:] = id
        return data.transform(buffer)

    data = sf.cut(Base(tripled, get=reused), "transform")
    records = [data.fetch(id) for id in range(4)]
    assert [data.pipeline(record).tolist() for record in records] == [[0, 0], [3, 3], [6, 6], [9, 9]]


def test_dotted_attributes() -> None:
    outer = SimpleNamespace(inner=Base(noisy))
    dataset = Base(None, outer, lambda data, id: data.other.inner[id])
    data = sf.cut(dataset, "other.inner.transform")
    agree(data, dataset)
    assert outer.inner.transform is noisy
    joined = ConcatDataset([Base(noisy), Base(tripled)])
    agree(sf.cut(joined, "datasets.0.transform", "datasets.1.transform"), joined)
    part = Subset(Base(noisy), [3, 5])
    agree(sf.cut(part, "dataset.transform"), part)


class Own(Base):
    def augment(self, image: Any) -> Any:
        return image + random.random()

    def __getitem__(self, id: int) -> Any:
        return self.augment(self.read(id)), id


@dataclass(frozen=True)
class Frozen(Base):
    transform: Any = noisy
    get: Any = None


def test_a_method_as_transform_and_a_frozen_data_set() -> None:
    agree(sf.cut(Own(), "augment"), Own())
    agree(sf.cut(Frozen(), "transform"), Frozen())


def test_the_fingerprint_is_that_of_the_rest() -> None:
    one = sf.cut(Base(noisy, 1), "transform").fingerprint()
    assert one == sf.cut(Base(tripled, 1), "transform").fingerprint()
    assert one != sf.cut(Base(noisy, 2), "transform").fingerprint()


class Late(Base):
    file: Any = None

    def read(self, id: int) -> Any:
        self.file = self.file or threading.Lock()  # as a handle, it has no fingerprint and no pickle
        return super().read(id)


def test_what_is_opened_while_cut_looks_is_opened_again() -> None:
    """In a data set that opens its file late, each process has to open it for itself."""
    dataset = Late(tripled)
    data = sf.cut(dataset, "transform")
    data.fingerprint()
    assert dataset.file is None
    assert data[1][1] == 1
    agree(pickle.loads(pickle.dumps(data)), Late(tripled))


def test_threads_do_not_share_what_they_record() -> None:
    def slow(data: Base, id: int) -> Any:
        made = data.transform(data.read(id))
        time.sleep(0.002)
        return made, id

    data = sf.cut(Base(tripled, get=slow), "transform")
    with ThreadPoolExecutor(4) as pool:
        assert [image[0, 0] for image, _ in pool.map(data.fetch, range(COUNT))] == list(range(COUNT))


# --- what is refused ------------------------------------------------------------------------------------------------


def as_tensor(image: Any) -> Any:
    return torch.from_numpy(image) * 1.0


def caught(output: Any) -> Any:
    try:
        return output.mean()
    except Exception:
        return output


USES: dict[str, tuple[Callable[[Any], Any], str] | tuple[Callable[[Any], Any], str, Any]] = {
    "attribute": (lambda output: output.shape, "the attribute 'shape'"),
    "caught": (caught, "the attribute 'mean'"),
    "arithmetic": (lambda output: output / 255, "__truediv__"),
    "reflected": (lambda output: 1 - output, "__rsub__"),
    "comparison": (lambda output: output > 3, "__gt__"),
    "truth": (lambda output: 1 if output else 0, "__bool__", np.max),
    "torch": (lambda output: torch.stack([output, output]), "__torch_function__"),
    "tensor": (torch.as_tensor, "converted to an array"),
    "numpy": (np.asarray, "converted to an array", tripled),
    "ufunc": (np.sqrt, "converted to an array", tripled),
    "numpy function": (lambda output: np.stack([output]), "converted to an array", tripled),
    "slice": (lambda output: output[:1], "type slice"),
    "text": (lambda output: f"{output}", "__format__"),
    "copy": (copy.deepcopy, "__deepcopy__"),
    "set": (lambda output: output.__setitem__(0, 1), "__setitem__"),
    "length": (len, "without the output"),
    "type": (lambda output: isinstance(output, torch.Tensor), "differs if the transform runs after"),
    "hidden": (lambda output: SimpleNamespace(inner=SimpleNamespace(output=output)), "differs|compared|was copied"),
}


@pytest.mark.parametrize("name", USES)
def test_uses_of_the_output_are_refused(name: str) -> None:
    use, said, *transform = USES[name]
    dataset = Base(*(transform or [as_tensor]), get=lambda data, id: (use(data.transform(data.read(id))), id))
    with pytest.raises(InputError, match=said) as caught:
        sf.cut(dataset, "transform")
    assert "Base cannot be cut at 'transform'" in str(caught.value)
    assert "sample 0" in str(caught.value)


class Fixed(Base):
    def __init__(self) -> None:
        self.get = None

    @property
    def transform(self) -> Any:
        return noisy


@pytest.mark.parametrize(
    ("make", "names", "said"),
    [
        (lambda: Base(noisy), ["tranform"], r"Base has no attribute 'tranform' .*: name one .* such as transform"),
        (lambda: Base(noisy), ["transform", "other"], "has no attribute 'other' that can be called"),
        (lambda: Base(3), ["transform"], "has no attribute 'transform' that can be called"),
        (lambda: Base(noisy), ["inner.transform"], r"no attribute 'inner\.transform'"),
        (lambda: Base(noisy), [], "got no attribute"),
        (lambda: Base(noisy, noisy), ["transform", "other"], "does not call its other for any of the samples 0,"),
        (Fixed, ["transform"], "make the transform a plain attribute"),
        (lambda: sf.cut(Base(noisy), "transform"), ["transform"], "apart already"),
        (lambda: Subset(Base(noisy), []), ["dataset.transform"], "length 0"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_cut(make: Callable[[], Any], names: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        sf.cut(make(), *names)


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda id: random.random(), "when sample 0 was read, it drew"),
        (lambda id: random.random() if id == COUNT - 1 else 0, f"when sample {COUNT - 1} was read, it drew"),
        (lambda id: np.random.default_rng().random(), "it returned something else for the same input"),
        (lambda id: random.random() if id < 0 else 0, r"its code names random\.random in "),
    ],
)
def test_own_draws_are_refused(draw: Callable[[int], Any], said: str) -> None:
    with pytest.raises(InputError, match=f"outside of the transform it draws .*{said}"):
        sf.cut(Base(tripled, get=lambda data, id: (data.transform(data.read(id) + draw(id)), id)), "transform")


def changed_later(data: Base, id: int) -> Any:
    """Changes the array after the transform got it, and in it its output."""
    image = data.read(id)
    made = data.transform(image)
    image += 5
    return made, id


class Keeping(Base):
    def __getitem__(self, id: int) -> Any:
        self.other = self.other or {}
        if id not in self.other:
            self.other[id] = self.transform(self.read(id))
        return self.other[id]


class Last(Base):
    def __getitem__(self, id: int) -> Any:
        before, self.other = self.other, self.transform(self.read(id))
        return self.other, before


def factor(image: Any) -> Any:
    return image


factor.size = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Base(lambda image: image, get=changed_later), "sample 0 differs if the transform runs after"),
        (Base(lambda image: image + np.random.default_rng().random()), "sample 0 differs each time"),
        (Keeping(tripled), "keeps its samples"),
        (Last(tripled), r"cut at 'transform': when sample \d+ was made, .* kept from another sample"),
        (Base(factor, get=lambda data, id: data.transform(id) * data.transform.size), "the attribute 'size' of the tr"),
        (Base(lambda id: iter(range(3)), get=lambda data, id: [*data.transform(id)]), "of type range_iterator, was it"),
    ],
)
def test_samples_that_cannot_be_made_later(dataset: Base, said: str) -> None:
    with pytest.raises(InputError, match=said):
        sf.cut(dataset, "transform")
    assert not isinstance(dataset, Keeping) or dataset.other is None


def test_a_sample_unlike_those_that_were_compared() -> None:
    dataset = Base(tripled, get=lambda data, id: data.read(id) if id == 1 else data.transform(data.read(id)))
    data = sf.cut(dataset, "transform")
    with pytest.raises(InputError, match=r"for sample 1, Base calls its transforms in another way.*check=\[1\]"):
        data.fetch(1)
    agree(sf.cut(dataset, "transform", check=[1]), dataset)


def test_unpacked_to_another_length() -> None:
    lists = Base(lambda id: [id] * (3 if id == 1 else 2), get=lambda data, id: list(data.transform(id)))
    data = sf.cut(lists, "transform")
    assert data[4] == [4, 4]
    with pytest.raises(InputError, match="returned 3 values, and 2 when the data set was cut"):
        data[1]


def test_a_transform_that_is_replaced_later() -> None:
    dataset = Base(noisy)
    data = sf.cut(dataset, "transform")
    dataset.transform = tripled
    with pytest.raises(InputError, match="the transform of Base was changed"):
        data.fetch(0)


class Damaged(Base):
    def read(self, id: int) -> Any:
        if id in self.other:
            raise OSError("damaged")
        return id


def test_samples_that_cannot_be_read_are_left_out() -> None:
    data = sf.cut(Damaged(tripled, {0, 1}), "transform")
    assert data[3] == (9, 3)
    with pytest.raises(OSError, match=r"damaged\n.*fetching sample 1"):
        data[1]
    with pytest.raises(OSError, match=r"damaged\n.*fetching sample 0"):
        sf.cut(Damaged(tripled, set(range(COUNT))), "transform")
