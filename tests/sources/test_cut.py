"""`cut`: data sets split at their own transforms, with the same samples; what cannot be split is refused."""

from __future__ import annotations

import collections
import copy
import pickle
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import albumentations
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, IterableDataset, Subset

import stallfree as sf
from loader_data import same
from stallfree.errors import InputError
from stallfree.pipeline.compose import OnItem
from stallfree.pipeline.protocol import Source
from stallfree.sources.mapped import SubsetSource, as_source

COUNT = 20


class Base:
    """Arrays and labels; `transform` and `other` are called as the subclasses say."""

    def __init__(self, transform: Any = None, other: Any = None) -> None:
        self.transform, self.other = transform, other

    def __len__(self) -> int:
        return COUNT

    def read(self, id: int) -> Any:
        return np.full((2, 3), id, np.int64)

    def __getitem__(self, id: int) -> Any:
        return self.transform(self.read(id)), id


def noisy(value: Any) -> Any:
    return value + random.random()


def normal(value: Any) -> Any:
    return value + torch.randn(()).item() + np.random.rand()


def tripled(value: Any) -> Any:
    return value * 3


def both(image: Any, mask: Any) -> Any:
    shift = random.random()
    return image + shift, mask - shift


def named(**parts: Any) -> Any:
    shift = random.random()
    return {name: value + shift for name, value in parts.items()}


class OnLabel(Base):
    def __getitem__(self, id: int) -> Any:
        return self.transform(self.read(id)), self.other(id)


class LabelFirst(Base):
    def __getitem__(self, id: int) -> Any:
        label = self.other(id)
        return self.transform(self.read(id)), label


class Alone(Base):
    def __getitem__(self, id: int) -> Any:
        return self.transform(self.read(id))


class Nested(Base):
    def __getitem__(self, id: int) -> Any:
        return {"image": [id, (self.transform(self.read(id)),)], "label": id}


Pair = collections.namedtuple("Pair", "image label")


class Named(Base):
    def __getitem__(self, id: int) -> Any:
        return Pair(self.transform(self.read(id)), id)


class Chain(Base):
    def __getitem__(self, id: int) -> Any:
        return self.other(self.transform(self.read(id))), id


class Twice(Base):
    def __getitem__(self, id: int) -> Any:
        image = self.read(id)
        return self.transform(image), self.transform(image + 1), id


class Unpacked(Base):
    def __getitem__(self, id: int) -> Any:
        image, mask = self.transform(self.read(id), self.read(id) + 1)
        return {"mask": mask, "image": image, "id": id}


class ByKey(Base):
    def __getitem__(self, id: int) -> Any:
        made = self.transform(image=self.read(id), mask=self.read(id) + 1)
        return made["image"], made["mask"], id


class Crops(Base):
    """Each item of an output goes through another transform."""

    def __getitem__(self, id: int) -> Any:
        return [self.other(crop) for crop in self.transform(self.read(id), 1)], id


class Bag:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


class Unused(Base):
    def __getitem__(self, id: int) -> Any:
        self.transform(0)
        return self.other(self.read(id)), id


class Same(Base):
    """One output in two places."""

    def __getitem__(self, id: int) -> Any:
        image = self.transform(self.read(id))
        return image, image


class BySample(Base):
    """One of two transforms for each sample; some have none."""

    def __getitem__(self, id: int) -> Any:
        image = self.read(id)
        return self.transform(image) if id % 3 == 0 else self.other(image) if id % 3 == 1 else image, id


def crops(image: Any, shift: int) -> Any:
    return [image + random.random(), image + shift, image]


FLAT: dict[str, tuple[Base, tuple[str, ...]]] = {
    "one": (Base(noisy), ("transform",)),
    "composed": (Base(sf.Compose([tripled, noisy, normal])), ("transform",)),
    "two": (OnLabel(normal, noisy), ("transform", "other")),
    "one of two": (OnLabel(normal, tripled), ("transform",)),
    "label first": (LabelFirst(normal, noisy), ("transform", "other")),
    "alone": (Alone(noisy), ("transform",)),
    "nested": (Nested(noisy), ("transform",)),
    "chain": (Chain(noisy, normal), ("transform", "other")),
    "twice": (Twice(sf.Compose([noisy, normal])), ("transform",)),
}
PLANNED: dict[str, tuple[Base, tuple[str, ...]]] = {
    "unpacked": (Unpacked(both), ("transform",)),
    "by key": (ByKey(named), ("transform",)),
    "crops": (Crops(crops, noisy), ("transform", "other")),
    "named tuple": (Named(noisy), ("transform",)),
    "unused": (Unused(noisy, noisy), ("transform", "other")),
    "same": (Same(noisy), ("transform",)),
    "by sample": (BySample(noisy, normal), ("transform", "other")),
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


@pytest.mark.parametrize("name", FLAT)
def test_steps_stand_on_the_places_of_a_sample(name: str) -> None:
    """So that each is classified by itself."""
    dataset, attributes = FLAT[name]
    assert all(type(step) is OnItem or step is noisy for step in sf.cut(dataset, *attributes).pipeline)


def test_fetch_gives_what_the_transform_is_called_with() -> None:
    data = sf.cut(Base(sf.Compose([tripled, noisy])), "transform")
    assert same(data.fetch(4), (np.full((2, 3), 4, np.int64), 4))
    assert [str(step) for step in data.pipeline] == ["OnItem(0, test_cut.tripled)", "OnItem(0, test_cut.noisy)"]


def test_albumentations() -> None:
    class OneImage(Base):
        def read(self, id: int) -> Any:
            return (np.arange(192).reshape(8, 8, 3) * (2 * id + 7) % 251).astype(np.uint8)

        def __getitem__(self, id: int) -> Any:
            return self.transform(image=self.read(id))["image"], id

    class WithMask(OneImage):
        def __getitem__(self, id: int) -> Any:
            made = self.transform(image=self.read(id), mask=self.read(id)[..., 0])
            return made["image"], made["mask"]

    flips = albumentations.Compose([albumentations.HorizontalFlip(), albumentations.RandomCrop(4, 4)], seed=3)
    data = sf.cut(OneImage(flips), "transform")
    assert same(data.fetch(2), (OneImage().read(2), 2))
    assert type(data.pipeline.transforms[0]) is OnItem
    masks = sf.cut(WithMask(flips), "transform")
    image, mask = masks[1]
    assert image.shape == (4, 4, 3)
    assert np.array_equal(image[..., 0], mask)
    assert sf.split(masks.pipeline).verdicts[0].random


def test_files_that_are_closed_after_the_call(tmp_path: Path) -> None:
    for id in range(3):
        Image.fromarray(np.full((5, 4, 3), 10 * id, np.uint8)).save(tmp_path / f"{id}.png")

    class Files(Base):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, id: int) -> Any:
            with Image.open(tmp_path / f"{id}.png") as image:
                return self.transform(image), id

    data = sf.cut(Files(np.asarray), "transform")
    assert [sample[0].max() for sample in data] == [0, 10, 20]


def test_buffers_that_are_used_again() -> None:
    class Buffered(Base):
        buffer = np.zeros(2)

        def __getitem__(self, id: int) -> Any:
            self.buffer[:] = id
            return self.transform(self.buffer)

    data = sf.cut(Buffered(tripled), "transform")
    records = [data.fetch(id) for id in range(4)]
    assert [data.pipeline(record).tolist() for record in records] == [[0, 0], [3, 3], [6, 6], [9, 9]]


def test_dotted_attributes() -> None:
    outer = SimpleNamespace(inner=Base(noisy))

    class Outer(Base):
        def __getitem__(self, id: int) -> Any:
            return outer_of(self)[id]

    def outer_of(dataset: Any) -> Any:
        return dataset.other.inner

    dataset = Outer(None, outer)
    data = sf.cut(dataset, "other.inner.transform")
    agree(data, dataset)
    assert outer.inner.transform is noisy
    joined = ConcatDataset([Base(noisy), Base(tripled)])
    agree(sf.cut(joined, "datasets.0.transform", "datasets.1.transform"), joined)
    part = Subset(Base(noisy), [3, 5])
    agree(sf.cut(part, "dataset.transform"), part)


def test_a_method_as_transform() -> None:
    class Own(Base):
        def augment(self, image: Any) -> Any:
            return image + random.random()

        def __getitem__(self, id: int) -> Any:
            return self.augment(self.read(id)), id

    dataset = Own()
    agree(sf.cut(dataset, "augment"), dataset)


@dataclass(frozen=True)
class Frozen(Base):
    transform: Any = noisy

    def __getitem__(self, id: int) -> Any:
        return self.transform(id)


def test_frozen_data_sets() -> None:
    agree(sf.cut(Frozen(), "transform"), Frozen())


def test_subsets_are_sources() -> None:
    data = as_source(Subset(sf.cut(Base(tripled), "transform"), [7, 2]))
    assert isinstance(data, SubsetSource)
    assert same(data.fetch(0), (np.full((2, 3), 7, np.int64), 7))
    assert data[1][0].tolist() == [[6] * 3] * 2


def test_the_fingerprint_is_that_of_the_rest() -> None:
    class Scaled(Base):
        def __init__(self, transform: Any, scale: int) -> None:
            super().__init__(transform)
            self.scale = scale

    one = sf.cut(Scaled(noisy, 1), "transform").fingerprint()
    assert one == sf.cut(Scaled(noisy, 1), "transform").fingerprint()
    assert one == sf.cut(Scaled(tripled, 1), "transform").fingerprint()
    assert one != sf.cut(Scaled(noisy, 2), "transform").fingerprint()
    assert one != sf.cut(Base(noisy), "transform").fingerprint()


def test_what_is_opened_while_cut_looks_is_opened_again() -> None:
    """In a data set that opens its file late, each process has to open it for itself."""

    class Late(Base):
        file: Any = None

        def __getitem__(self, id: int) -> Any:
            if self.file is None:
                self.file = threading.Lock()  # as a handle, it has no fingerprint and no pickle
            return self.transform(self.read(id)), id

    globals()["Late"], Late.__qualname__ = Late, "Late"
    dataset = Late(tripled)
    data = sf.cut(dataset, "transform")
    data.fingerprint()
    assert dataset.file is None
    assert data[1][1] == 1
    agree(pickle.loads(pickle.dumps(data)), Late(tripled))


def test_threads_do_not_share_what_they_note() -> None:
    class Slow(Base):
        def __getitem__(self, id: int) -> Any:
            made = self.transform(self.read(id))
            time.sleep(0.002)
            return made, id

    data = sf.cut(Slow(tripled), "transform")
    wrong: list[int] = []

    def work() -> None:
        wrong.extend(id for id in range(COUNT) if data.fetch(id)[0][0, 0] != id)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- what is refused ------------------------------------------------------------------------------------------------


def using(use: Callable[[Any], Any], transform: Any) -> Any:
    class User(Base):
        def __getitem__(self, id: int) -> Any:
            return use(self.transform(self.read(id))), id

    return User(transform)


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
    "hidden": (lambda output: Bag(inner=Bag(output=output)), "differs|cannot be compared"),
}


@pytest.mark.parametrize("name", USES)
def test_uses_of_the_output_are_refused(name: str) -> None:
    use, said, *transform = USES[name]
    dataset = using(use, *(transform or [as_tensor]))
    before = dict(vars(dataset))
    with pytest.raises(InputError, match=said) as caught:
        sf.cut(dataset, "transform")
    assert "User cannot be cut at 'transform'" in str(caught.value)
    assert "sample 0" in str(caught.value)
    assert vars(dataset) == before


def test_attributes_of_the_transform_are_refused() -> None:
    class Sized(Base):
        def __getitem__(self, id: int) -> Any:
            return self.transform(self.read(id)), self.transform.factor

    def scaled(image: Any) -> Any:
        return image

    scaled.factor = 3  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="the attribute 'factor' of the transform was read"):
        sf.cut(Sized(scaled), "transform")


def test_attributes_that_hold_no_transform() -> None:
    with pytest.raises(InputError, match=r"Base has no attribute 'tranform'.*callable are transform"):
        sf.cut(Base(noisy), "tranform")
    with pytest.raises(InputError, match="the other of Base is None"):
        sf.cut(Base(noisy), "transform", "other")
    with pytest.raises(InputError, match="of type int, which cannot be called"):
        sf.cut(Base(3), "transform")
    with pytest.raises(InputError, match="got no attribute"):
        sf.cut(Base(noisy))
    with pytest.raises(InputError, match="Base does not call its other for any of the samples 0,"):
        sf.cut(Base(noisy, noisy), "transform", "other")
    with pytest.raises(InputError, match=r"no attribute 'inner\.transform'"):
        sf.cut(Base(noisy), "inner.transform")

    class Fixed(Base):
        def __init__(self) -> None:
            pass

        @property
        def transform(self) -> Any:
            return noisy

    with pytest.raises(InputError, match="make the transform a plain attribute"):
        sf.cut(Fixed(), "transform")


def test_what_is_no_data_set_to_cut() -> None:
    class Endless(IterableDataset[int]):
        transform = tripled

        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(InputError, match="IterableDataset"):
        sf.cut(Endless(), "transform")
    with pytest.raises(InputError, match="is a class"):
        sf.cut(Base, "transform")
    with pytest.raises(InputError, match="apart already"):
        sf.cut(sf.cut(Base(noisy), "transform"), "transform")
    with pytest.raises(InputError, match="length 0"):
        sf.cut(Subset(Base(noisy), []), "dataset.transform")


def test_own_draws_are_refused() -> None:
    class Drawing(Base):
        def __getitem__(self, id: int) -> Any:
            return self.transform(self.read(id) + random.random()), id

    class Seldom(Base):
        def __getitem__(self, id: int) -> Any:
            return self.transform(self.read(id) + (random.random() if id == COUNT - 1 else 0)), id

    class Unseeded(Base):
        def __getitem__(self, id: int) -> Any:
            return self.transform(self.read(id) + np.random.default_rng().random()), id

    for dataset, id in ((Drawing(noisy), 0), (Seldom(noisy), COUNT - 1)):
        with pytest.raises(InputError, match=f"outside of the transform.*when sample {id} was read"):
            sf.cut(dataset, "transform")
    with pytest.raises(InputError, match=r"outside of the transform.*something else for the same input"):
        sf.cut(Unseeded(tripled), "transform")

    class Hidden(Base):
        def __getitem__(self, id: int) -> Any:
            return self.transform(self.read(id) + (random.random() if id < 0 else 0)), id

    with pytest.raises(InputError, match=r"also without the transform.*names random\.random in .*__getitem__"):
        sf.cut(Hidden(tripled), "transform")


def test_other_samples_are_refused() -> None:
    class Late(Base):
        """Changes the array after it gave it to the transform, and in it its output."""

        def __getitem__(self, id: int) -> Any:
            image = self.read(id)
            made = self.transform(image)
            image += 5
            return made, id

    with pytest.raises(InputError, match="sample 0 differs if the transform runs after"):
        sf.cut(Late(lambda image: image), "transform")
    with pytest.raises(InputError, match="sample 0 differs each time"):
        sf.cut(Base(lambda image: image + np.random.default_rng().random()), "transform")


def test_kept_samples_are_refused() -> None:
    class Keeping(Base):
        def __init__(self, transform: Any) -> None:
            super().__init__(transform)
            self.kept: dict[int, Any] = {}

        def __getitem__(self, id: int) -> Any:
            if id not in self.kept:
                self.kept[id] = self.transform(self.read(id))
            return self.kept[id]

    dataset = Keeping(tripled)
    with pytest.raises(InputError, match="keeps its samples"):
        sf.cut(dataset, "transform")
    assert all(isinstance(sample, np.ndarray) for sample in dataset.kept.values())


def test_a_sample_unlike_those_that_were_compared() -> None:
    class Once(Base):
        def __getitem__(self, id: int) -> Any:
            return self.read(id) if id == 1 else self.transform(self.read(id))

    dataset = Once(tripled)
    data = sf.cut(dataset, "transform")
    with pytest.raises(InputError, match=r"for sample 1, Once calls its transforms in another way.*check=\[1\]"):
        data.fetch(1)
    agree(sf.cut(dataset, "transform", check=[1]), dataset)


def test_unpacked_to_another_length() -> None:
    class Lists(Base):
        def __getitem__(self, id: int) -> Any:
            return list(self.transform(id))

    data = sf.cut(Lists(lambda id: [id] * (3 if id == 1 else 2)), "transform")
    assert data[4] == [4, 4]
    with pytest.raises(InputError, match="returned 3 values, and 2 when the data set was cut"):
        data[1]
    with pytest.raises(InputError, match="of type generator, was iterated over"):
        sf.cut(Lists(lambda id: (each for each in range(3))), "transform")


def test_a_transform_that_is_replaced_later() -> None:
    dataset = Base(noisy)
    data = sf.cut(dataset, "transform")
    dataset.transform = tripled
    with pytest.raises(InputError, match="the transform of Base was changed"):
        data.fetch(0)


def test_samples_that_cannot_be_read_are_left_out() -> None:
    class Damaged(Base):
        def read(self, id: int) -> Any:
            if id in self.other:
                raise OSError("damaged")
            return id

    dataset = Damaged(tripled, {0, 1})
    data = sf.cut(dataset, "transform")
    assert data[3] == (9, 3)
    with pytest.raises(OSError, match=r"damaged\n.*fetching sample 1"):
        data[1]
    with pytest.raises(OSError, match=r"damaged\n.*fetching sample 0"):
        sf.cut(Damaged(tripled, set(range(COUNT))), "transform")


def test_outputs_that_are_kept_are_refused() -> None:
    class Last(Base):
        last: Any = None

        def __getitem__(self, id: int) -> Any:
            before, self.last = self.last, self.transform(self.read(id))
            return self.last, before

    with pytest.raises(InputError, match=r"cut at 'transform': sample \d+ has an output .* kept from another sample"):
        sf.cut(Last(tripled), "transform")
