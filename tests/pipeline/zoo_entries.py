"""Entries that are deterministic, some of which look random at first sight; and entries that draw in all ways."""

import io
import json
import operator
import pathlib
import random as pyrandom
import re
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from random import random as draw_number
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import zoo
from PIL import Image
from standins import V1, foreign, torchvision_compose
from torch import nn
from torch.utils.data import TensorDataset

from zoo import (  # isort: skip
    COUNT, either_entry, images, labelled, many, of_step, of_steps, random_entry, rows, steady_entry, tensors,
)  # fmt: skip

import frozen as fr
import stallfree as sf

A = partial(import_module, "albumentations")  # all processes that are forked after it take twice as long
RANDOM_CROP_SIZE = 32


@steady_entry(zoo.encoded)
def decode_resize_normalise() -> Any:
    def decode(data: Any) -> Any:
        return Image.open(io.BytesIO(data)).convert("RGB")

    def resize(image: Any) -> Any:
        return image.resize((16, 16), Image.Resampling.BILINEAR)

    def normalise(image: Any) -> Any:
        return (np.asarray(image, np.float32) / 255 - 0.45) / 0.225

    return [decode, resize, normalise]


of_steps(steady_entry(images), to_tensor=lambda x: torch.from_numpy(x.transpose(2, 0, 1).astype(np.float32) / 255))
of_steps(steady_entry(tensors), dropout_that_is_off=lambda x: F.dropout(x, 0.5, training=False))


@steady_entry(tensors)
def network_in_eval_mode() -> Any:
    layers = [nn.Unflatten(0, (1, 64)), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU()]
    network = nn.Sequential(*layers).eval().requires_grad_(False)
    for weights in network.parameters():
        weights.copy_(torch.linspace(-1, 1, weights.numel()).reshape(weights.shape))
    return network


MEAN, DEVIATION, BUFFER = np.zeros(64, np.float32) + 0.1, np.ones(64, np.float32), np.empty(64, np.float32)
PLACES = {label: 9 - label for label in range(10)}
WORDS = {word: place for place, word in enumerate(["the", "quick", "brown", "fox", "jumps", "over"], 1)}
DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)")
of_steps(steady_entry(), normalise=lambda x, mean=MEAN: (x - mean) / DEVIATION)
of_steps(steady_entry(labelled), label_to_index=lambda sample: (torch.as_tensor(sample[0]), PLACES[sample[1]]))
of_steps(
    steady_entry(zoo.texts), json_and_back=lambda text: json.loads(json.dumps({"text": text, "length": len(text)})),
    tokenise=lambda text: torch.tensor([WORDS.get(word, 0) for word in text.split()]),
    regular_expressions=lambda text: (re.sub(r"\s+", "_", text), [match.groups() for match in DATE.finditer(text)]),
)  # fmt: skip


@steady_entry(zoo.texts)
def file_by_path() -> Any:
    folder = tempfile.TemporaryDirectory()
    file = pathlib.Path(folder.name, "words.txt")
    file.write_text("the\nquick\nfox\n")
    return lambda text, folder=folder: sum([word in file.read_text().split() for word in text.split()])


@either_entry()
def generator_kept_but_used_in_the_constructor_only() -> Any:
    class Shuffle:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(0)
            self.order = self.rng.permutation(64)

        def __call__(self, x: Any) -> Any:
            return x[self.order]

    return Shuffle()


of_steps(
    either_entry(), permutation_with_a_constant_seed=lambda x: x[np.random.default_rng(0).permutation(len(x))],
    seeded_by_content=lambda x: x + np.random.default_rng(zlib.crc32(x.tobytes())).normal(size=64),
    draws_and_does_not_use_it=lambda x: (pyrandom.random(), np.sort(x))[1],
    seeds_the_global_generator_with_a_constant=lambda x: (np.random.seed(0), x + np.random.normal(size=64))[1],
)  # fmt: skip
of_steps(
    either_entry(tensors),
    torch_with_a_constant_seed=lambda x: x[torch.randperm(64, generator=torch.Generator().manual_seed(0))],
)
of_steps(either_entry(zoo.texts), hash_of_a_string=lambda x: hash(x), order_of_a_set=lambda x: list(set(x.split())))


@steady_entry()
def random_in_names_only() -> Any:
    def random_crop_disabled(x: Any, randomise: bool = False) -> Any:
        seed = random_offset = 3
        return x[random_offset : random_offset + RANDOM_CROP_SIZE] * seed

    return random_crop_disabled


@steady_entry()
def random_in_text() -> Any:
    options = {"random": 1.0, "shuffle": 2.0}

    def weigh(x: Any) -> Any:
        """Uses no random numbers, nor time.time()."""
        return x * options["random"] + len("os.urandom") - options["shuffle"]

    return weigh


@steady_entry()
def collects_statistics() -> Any:
    class Statistics:
        def __init__(self) -> None:
            self.means: list[float] = []

        def __call__(self, x: Any) -> Any:
            self.means.append(float(x.mean()))
            return x - x.mean()

    return Statistics()


of_steps(
    steady_entry(), changes_its_input=lambda x: np.multiply(x, 2, out=x),
    buffer_of_its_own=lambda x, out=BUFFER: np.multiply(x, 3, out=out).copy(),
)  # fmt: skip


@either_entry()
def measures_its_own_time() -> Any:
    seconds: list[float] = []

    def timed(x: Any) -> Any:
        began = time.perf_counter()
        out = np.sort(x)
        seconds.append(time.perf_counter() - began)
        return out

    return timed


class Files(fr.Rows):
    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        super().__init__([f"{self.folder.name}/{id}.npy" for id in range(COUNT)])
        for file, row in zip(self.records, rows(), strict=True):
            np.save(file, row)

    def __getitem__(self, id: int) -> Any:
        return np.load(self.records[id])


data_set = steady_entry(None)
data_set(lambda: fr.Rows(rows()), "data_set_in_memory")
data_set(lambda: TensorDataset(torch.from_numpy(np.stack(rows())), torch.arange(COUNT)), "data_set_of_tensors")
data_set(Files, "data_set_of_files")


steady_entry(images)(lambda: A().Compose([A().Resize(16, 16), A().Normalize()]), "albumentations_resize")


def with_keys() -> list[Any]:
    return [
        {"image": np.ascontiguousarray(pixels.transpose(2, 0, 1)).astype(np.float32), "id": id}
        for id, pixels in enumerate(images())
    ]


@steady_entry(with_keys)
def monai_scale_by_key() -> Any:
    from monai import transforms

    return transforms.Compose([transforms.NormalizeIntensityd("image"), transforms.CenterSpatialCropd("image", (8, 8))])


steady_entry(tensors)(
    lambda: torchvision_compose(foreign("Normalize", V1, __call__=lambda self, x: (x - 0.5) / 0.5)),
    "torchvision_normalise",
)


def noisy(x: Any) -> Any:
    return x + np.random.normal(0, 1, 64).astype(np.float32)


def hidden(x: Any) -> Any:
    return x + np.random.default_rng().normal()


def rarely_hidden(x: Any) -> Any:
    rng = np.random.default_rng()
    return x + rng.normal(0, 1, 64).astype(np.float32) if rng.random() < 0.01 else x


def in_a_pool(x: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return x + pool.submit(np.random.normal).result()


@of_step(random_entry(zoo.first_is_short, draws=lambda id: id > 0))
def crop_or_pad(x: Any) -> Any:
    if len(x) <= 64:
        return np.pad(x, (0, 64 - len(x)))
    start = np.random.randint(0, len(x) - 64 + 1)
    return x[start : start + 64]


of_steps(
    random_entry(labelled, draws=lambda id: id % 10 == 7),
    minority_class=lambda sample: (noisy(sample[0]) if sample[1] == 7 else sample[0], sample[1]),
)
last_only, every_fourth, every_sixth = (
    random_entry(draws=draws) for draws in (lambda id: id == COUNT - 1, lambda id: id % 4 == 3, lambda id: id % 6 == 5)
)
of_steps(last_only, only_the_last=lambda x: x if x[0] < COUNT - 1 else x + draw_number())
of_steps(every_fourth, clock_for_some=lambda x: (x, time.time() if int(x[0]) % 4 == 3 else 0.0))
of_steps(every_sixth, drawn_in_a_pool_for_some=lambda x: in_a_pool(x) if int(x[0]) % 6 == 5 else x)
of_steps(random_entry(many, draws=lambda id: id == 200), one_sample_of_many=lambda x: noisy(x) if x[0] == 200 else x)
of_steps(
    random_entry(many, base=np.copy), rare_numpy=lambda x: noisy(x) if np.random.rand() < 0.01 else x,
    rare_with_generator_made_inside=rarely_hidden,
)  # fmt: skip
of_steps(
    random_entry(), python_random=lambda x: x + pyrandom.random(),
    numpy_legacy=lambda x: x + np.random.normal(0, 1, 64), bound_method_of_a_generator=np.random.default_rng(2).normal,
    permutation_of_numpy=np.random.permutation, clock_time=lambda x: np.append(x.astype(np.float64), time.time()),
    through_eval=lambda x: x + eval("np.random.default_rng().normal()"),
    through_getattr=lambda x: x + getattr(np.random, "default" + "_rng")().normal(),
    numpy_shuffle=lambda x: np.random.shuffle(x) or x,
)  # fmt: skip
of_steps(
    random_entry(tensors), torch_functional_dropout=lambda x: F.dropout(x, 0.5, training=True),
    torch_random_in_place=lambda x: x.clone().random_(), dropout_module=nn.Dropout(0.5),
    through_a_methodcaller=operator.methodcaller("uniform_"),
)  # fmt: skip


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


class Counted:
    """A step that changes a sample by a function of the samples before it."""

    def __init__(self, change: Callable[[Any, list[Any]], Any]) -> None:
        self.change, self.earlier = change, list[Any]()

    def __call__(self, x: Any) -> Any:
        self.earlier.append(x)
        return self.change(x, self.earlier)


def begun(x: Any, earlier: list[Any]) -> Any:
    return x + np.random.normal() if len(earlier) > 3 * COUNT // 2 else x


def mixed(x: Any, earlier: list[Any]) -> Any:
    return x + pyrandom.random() * earlier[pyrandom.randrange(len(earlier))]


stateful = random_entry(local=True)
stateful(lambda: Counted(lambda x, earlier: x + len(earlier) // 10), "counter_every_ten_calls")
stateful(lambda: Counted(begun), "begins_to_draw_later")
stateful(lambda: Counted(mixed), "mixed_with_earlier_samples")


class Stored(fr.Rows):
    """A data set whose `__getitem__` changes what it reads by a function of the id and the record."""

    def __init__(self, change: Callable[[int, Any], Any], records: list[Any] | None = None) -> None:
        super().__init__(rows() if records is None else records)
        self.change = change

    def __getitem__(self, id: int) -> Any:
        return self.change(id, super().__getitem__(id))


class Partly(fr.Transformed):
    def __getitem__(self, id: int) -> Any:
        return self.transform(self.data[id]) if id % 3 == 1 else self.data[id]


random_entry(None, draws=lambda id: id % 4 == 2)(
    lambda: Stored(lambda id, x: np.random.permutation(x)[:32] if id % 4 == 2 else x[:32]), "data_set_that_crops_some"
)
random_entry(None, base=np.copy)(
    lambda: Stored(lambda id, x: x + np.float32(pyrandom.random()) if pyrandom.random() < 0.01 else x, many()),
    "data_set_with_rare_draws",
)
random_entry(None, draws=lambda id: id == 5)(
    lambda: Stored(lambda id, x: (x, time.time() if id == 5 else 0.0)), "data_set_with_the_clock"
)
random_entry(None, draws=lambda id: id % 3 == 1)(
    lambda: Partly(fr.Rows(rows()), hidden), "data_set_with_transform_for_some"
)


random_entry(images, prefix="Resize.apply")(
    lambda: [A().Resize(16, 16), A().GaussNoise(p=1)], "albumentations_resize_then_noise"
)
random_entry(images)(
    lambda: A().Lambda(image=lambda image, **_: image + np.random.randint(0, 100, image.shape), p=1),
    "albumentations_lambda",
)


@random_entry(with_keys, prefix="ScaleIntensityd.__call__")
def monai_scale_then_noise_by_key() -> Any:
    from monai import transforms

    return transforms.Compose([transforms.ScaleIntensityd("image"), transforms.RandGaussianNoised("image", prob=1.0)])


@random_entry(with_keys, draws=lambda id: id % 4 == 1)
def monai_lambda_for_some() -> Any:
    from monai import transforms

    class Augmentd(transforms.MapTransform):
        def __call__(self, data: Any) -> Any:
            return data | {"image": data["image"] + np.random.normal()} if data["id"] % 4 == 1 else data

    return Augmentd(["image"])


def scaled(self: Any, x: Any) -> Any:
    return (x - 0.5) / 0.5


def erased(self: Any, x: Any) -> Any:
    return x * (torch.rand(64) > 0.5)


random_entry(tensors, prefix="scaled")(
    lambda: torchvision_compose(foreign("Normalize", V1, __call__=scaled), foreign("Erasing", V1, __call__=erased)),
    "torchvision_normalise_then_undeclared_erasing",
)
random_entry()(
    lambda: foreign("MyResize", __name__, type(foreign("Resize", V1)), __call__=lambda self, x: hidden(x)),
    "torchvision_subclass_that_draws",
)


@random_entry(zoo.named, prefix="ordered")
def on_item_then_random() -> Any:
    def ordered(x: Any) -> Any:
        return np.sort(x)

    return [sf.OnItem("x", ordered), sf.OnItem("x", hidden)]
