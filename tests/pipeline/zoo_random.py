"""Entries that draw: in some branches only, rarely, in roundabout ways, from every kind of generator, or by clocks."""

import operator
import random as pyrandom
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import random as draw_number
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import zoo
from standins import V1, foreign, torchvision_compose
from torch import nn
from zoo import COUNT, images, labelled, many, named, of_step, of_steps, random_entry, rows, tensors
from zoo_steady import with_keys

import frozen as fr
import stallfree as sf

# -- branches: some samples are drawn for, others are not ------------------------------------------------------------


@of_step(random_entry(zoo.first_is_short, draws=lambda id: id > 0))
def crop_or_pad(x: Any) -> Any:
    if len(x) <= 64:
        return np.pad(x, (0, 64 - len(x)))
    start = np.random.randint(0, len(x) - 64 + 1)
    return x[start : start + 64]


def noisy(x: Any) -> Any:
    return x + np.random.normal(0, 1, 64).astype(np.float32)


of_steps(
    random_entry(labelled, draws=lambda id: id % 10 == 7),
    minority_class=lambda sample: (noisy(sample[0]) if sample[1] == 7 else sample[0], sample[1]),
)
of_steps(
    random_entry(draws=lambda id: id == COUNT - 1),
    only_the_last=lambda x: x if x[0] < COUNT - 1 else x + draw_number(),
)
of_steps(
    random_entry(draws=lambda id: id % 4 == 3),
    clock_for_some=lambda x: (x, time.time() if int(x[0]) % 4 == 3 else 0.0),
)
of_steps(random_entry(many, draws=lambda id: id == 200), one_sample_of_many=lambda x: noisy(x) if x[0] == 200 else x)
of_steps(random_entry(many, base=zoo.unchanged), rare_numpy=lambda x: noisy(x) if np.random.rand() < 0.01 else x)


# -- kinds of generators ---------------------------------------------------------------------------------------------

of_steps(
    random_entry(),
    python_random=lambda x: x + pyrandom.random(),
    numpy_legacy=lambda x: x + np.random.normal(0, 1, 64),
    bound_method_of_a_generator=np.random.default_rng(2).normal,
    permutation_of_numpy=np.random.permutation,
    clock_time=lambda x: np.append(x.astype(np.float64), time.time()),
    through_eval=lambda x: x + eval("np.random.default_rng().normal()"),
    through_getattr=lambda x: x + getattr(np.random, "default" + "_rng")().normal(),
    numpy_shuffle=lambda x: np.random.shuffle(x) or x,
)
of_steps(
    random_entry(tensors),
    torch_functional_dropout=lambda x: F.dropout(x, 0.5, training=True),
    torch_random_in_place=lambda x: x.clone().random_(),
    dropout_module=nn.Dropout(0.5),
    through_a_methodcaller=operator.methodcaller("uniform_"),
)


# -- roundabout ways -------------------------------------------------------------------------------------------------


def hidden(x: Any) -> Any:
    return x + np.random.default_rng().normal()


@random_entry()
def through_a_subclass() -> Any:
    class Base:
        def __call__(self, x: Any) -> Any:
            return self.change(x)

    class Child(Base):
        def change(self, x: Any) -> Any:
            return hidden(x)

    return Child()


@random_entry(prefix="spectrum")
def steady_then_hidden() -> Any:
    def spectrum(x: Any) -> Any:
        return np.abs(np.fft.rfft(x)).astype(np.float32)

    return [spectrum, hidden]


# -- rare draws ------------------------------------------------------------------------------------------------------


@of_step(random_entry(many, base=zoo.unchanged))
def rare_with_generator_made_inside(x: Any) -> Any:
    rng = np.random.default_rng()
    return x + rng.normal(0, 1, 64).astype(np.float32) if rng.random() < 0.01 else x


# -- state -----------------------------------------------------------------------------------------------------------


class Counted:
    calls = 0

    def __init__(self, change: Callable[[Any, int], Any]) -> None:
        self.change = change

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return self.change(x, self.calls)


random_entry(local=True)(lambda: Counted(lambda x, calls: x + calls // 10), "counter_every_ten_calls")
random_entry(local=True)(
    lambda: Counted(lambda x, calls: x + np.random.normal() if calls > 3 * COUNT // 2 else x), "begins_to_draw_later"
)


@random_entry(local=True)
def mixed_with_earlier_samples() -> Any:
    class MixUp:
        def __init__(self) -> None:
            self.earlier: list[Any] = []

        def __call__(self, x: Any) -> Any:
            self.earlier.append(x)
            return x + pyrandom.random() * self.earlier[pyrandom.randrange(len(self.earlier))]

    return MixUp()


# -- threads ---------------------------------------------------------------------------------------------------------


@of_step(random_entry(draws=lambda id: id % 6 == 5))
def drawn_in_a_pool_for_some(x: Any) -> Any:
    if int(x[0]) % 6 != 5:
        return x
    with ThreadPoolExecutor(1) as pool:
        return x + pool.submit(np.random.normal).result()


# -- data sets whose `__getitem__` augments --------------------------------------------------------------------------


class Stored(fr.Rows):
    """Changes what it reads by a function of the id and the record."""

    def __init__(self, change: Callable[[int, Any], Any], records: list[Any] | None = None) -> None:
        super().__init__(rows() if records is None else records)
        self.change = change

    def __getitem__(self, id: int) -> Any:
        return self.change(id, super().__getitem__(id))


random_entry(None, draws=lambda id: id % 4 == 2)(
    lambda: Stored(lambda id, x: np.random.permutation(x)[:32] if id % 4 == 2 else x[:32]), "data_set_that_crops_some"
)
random_entry(None, base=zoo.unchanged)(
    lambda: Stored(lambda id, x: x + np.float32(pyrandom.random()) if pyrandom.random() < 0.01 else x, many()),
    "data_set_with_rare_draws",
)


random_entry(None, draws=lambda id: id == 5)(
    lambda: Stored(lambda id, x: (x, time.time() if id == 5 else 0.0)), "data_set_with_the_clock"
)


@random_entry(None, draws=lambda id: id % 3 == 1)
def data_set_with_transform_for_some() -> Any:
    class Partly(fr.Transformed):
        def __getitem__(self, id: int) -> Any:
            return self.transform(self.data[id]) if id % 3 == 1 else self.data[id]

    return Partly(fr.Rows(rows()), lambda x: x + np.random.default_rng().normal())


# -- libraries -------------------------------------------------------------------------------------------------------


@random_entry(images, prefix="Resize.apply")
def albumentations_resize_then_noise() -> Any:
    import albumentations as A

    return [A.Resize(16, 16), A.GaussNoise(p=1)]


@random_entry(images)
def albumentations_lambda() -> Any:
    import albumentations as A

    return A.Lambda(image=lambda image, **_: image + np.random.randint(0, 100, image.shape), p=1)


@random_entry(with_keys, prefix="ScaleIntensityd.__call__")
def monai_scale_then_noise_by_key() -> Any:
    from monai import transforms

    return transforms.Compose([transforms.ScaleIntensityd("image"), transforms.RandGaussianNoised("image", prob=1.0)])


@random_entry(with_keys, draws=lambda id: id % 4 == 1)
def monai_lambda_for_some() -> Any:
    from monai import transforms

    class Augmentd(transforms.MapTransform):
        def __call__(self, data: Any) -> Any:
            out = dict(data)
            if out["id"] % 4 == 1:
                out["image"] = out["image"] + np.random.normal()
            return out

    return Augmentd(["image"])


def scaled(self: Any, x: Any) -> Any:
    return (x - 0.5) / 0.5


def erased(self: Any, x: Any) -> Any:
    return x * (torch.rand(64) > 0.5)


random_entry(tensors, prefix="scaled")(
    lambda: torchvision_compose(foreign("Normalize", V1, __call__=scaled), foreign("Erasing", V1, __call__=erased)),
    "torchvision_normalise_then_undeclared_erasing",
)


@random_entry()
def torchvision_subclass_that_draws() -> Any:
    base = type(foreign("Resize", V1))
    member = {"__call__": lambda self, x: x + np.random.default_rng().normal()}
    return type("MyResize", (base,), {"__module__": __name__, **member})()


@random_entry(named, prefix="ordered")
def on_item_then_random() -> Any:
    def ordered(x: Any) -> Any:
        return np.sort(x)

    return [sf.OnItem("x", ordered), sf.OnItem("x", lambda x: x + np.random.default_rng().normal())]
