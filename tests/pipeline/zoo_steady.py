"""Deterministic entries; some look random at first sight, and some are seeded, which may count as random."""

import io
import json
import pathlib
import random as pyrandom
import re
import tempfile
import time
import zlib
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from standins import V1, foreign, torchvision_compose
from torch import nn
from torch.utils.data import TensorDataset
from zoo import COUNT, either_entry, encoded, images, labelled, of_step, of_steps, rows, steady_entry, tensors, texts

import frozen as fr

RANDOM_CROP_SIZE = 32

# -- pictures, arrays and tensors ------------------------------------------------------------------------------------


@steady_entry(encoded)
def decode_resize_normalise() -> Any:
    def decode(data: Any) -> Any:
        return Image.open(io.BytesIO(data)).convert("RGB")

    def resize(image: Any) -> Any:
        return image.resize((16, 16), Image.Resampling.BILINEAR)

    def normalise(image: Any) -> Any:
        return (np.asarray(image, np.float32) / 255 - 0.45) / 0.225

    return [decode, resize, normalise]


of_steps(
    steady_entry(images), to_tensor=lambda pixels: torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / 255)
)
of_steps(steady_entry(tensors), dropout_that_is_off=lambda x: F.dropout(x, 0.5, training=False))
of_steps(steady_entry(texts), json_and_back=lambda text: json.loads(json.dumps({"text": text, "length": len(text)})))


@steady_entry()
def normalise() -> Any:
    mean, deviation = np.zeros(64, np.float32) + 0.1, np.ones(64, np.float32)
    return lambda x: (x - mean) / deviation


@steady_entry(tensors)
def network_in_eval_mode() -> Any:
    layers = [nn.Unflatten(0, (1, 64)), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU()]
    network = nn.Sequential(*layers).eval().requires_grad_(False)
    for weights in network.parameters():
        weights.copy_(torch.linspace(-1, 1, weights.numel()).reshape(weights.shape))
    return network


@steady_entry(labelled)
def label_to_index() -> Any:
    places = {label: 9 - label for label in range(10)}
    return lambda sample: (torch.as_tensor(sample[0]), places[sample[1]])


# -- text and files --------------------------------------------------------------------------------------------------


@steady_entry(texts)
def tokenise() -> Any:
    words = {word: place for place, word in enumerate(["the", "quick", "brown", "fox", "jumps", "over"], 1)}
    return lambda text: torch.tensor([words.get(word, 0) for word in text.split()])


@steady_entry(texts)
def regular_expressions() -> Any:
    date = re.compile(r"(\d{4})-(\d\d)-(\d\d)")
    return lambda text: (re.sub(r"\s+", "_", text), [match.groups() for match in date.finditer(text)])


@steady_entry(texts)
def file_by_path() -> Any:
    folder = tempfile.TemporaryDirectory()
    file = pathlib.Path(folder.name, "words.txt")
    file.write_text("the\nquick\nfox\n")
    return lambda text, folder=folder: sum([word in file.read_text().split() for word in text.split()])


# -- seeded, or random by name only ----------------------------------------------------------------------------------


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
    either_entry(),
    permutation_with_a_constant_seed=lambda x: x[np.random.default_rng(0).permutation(len(x))],
    seeded_by_content=lambda x: x + np.random.default_rng(zlib.crc32(x.tobytes())).normal(size=64),
)
of_steps(either_entry(texts), hash_of_a_string=lambda x: hash(x), order_of_a_set=lambda x: list(set(x.split())))


@of_step(either_entry(tensors))
def torch_with_a_constant_seed(x: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    return x[torch.randperm(64, generator=generator)]


@of_step(either_entry())
def draws_and_does_not_use_it(x: Any) -> Any:
    pyrandom.random()
    return np.sort(x)


@of_step(either_entry())
def seeds_the_global_generator_with_a_constant(x: Any) -> Any:
    np.random.seed(0)
    return x + np.random.normal(size=64)


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


# -- stateful, but what comes out does not depend on it --------------------------------------------------------------


@steady_entry()
def collects_statistics() -> Any:
    class Statistics:
        def __init__(self) -> None:
            self.means: list[float] = []

        def __call__(self, x: Any) -> Any:
            self.means.append(float(x.mean()))
            return x - x.mean()

    return Statistics()


@steady_entry()
def buffer_of_its_own() -> Any:
    out = np.empty(64, np.float32)
    return lambda x: np.multiply(x, 3, out=out).copy()


@of_step(steady_entry())
def changes_its_input(x: Any) -> Any:
    x *= 2
    return x


@either_entry()
def measures_its_own_time() -> Any:
    seconds: list[float] = []

    def timed(x: Any) -> Any:
        began = time.perf_counter()
        out = np.sort(x)
        seconds.append(time.perf_counter() - began)
        return out

    return timed


# -- data sets and libraries -----------------------------------------------------------------------------------------

steady_entry(None)(lambda: fr.Rows(rows()), "data_set_in_memory")
steady_entry(None)(
    lambda: TensorDataset(torch.from_numpy(np.stack(rows())), torch.arange(COUNT)), "data_set_of_tensors"
)


@steady_entry(None)
def data_set_of_files() -> Any:
    class Files(fr.Rows):
        def __init__(self) -> None:
            self.folder = tempfile.TemporaryDirectory()
            super().__init__([f"{self.folder.name}/{id}.npy" for id in range(COUNT)])
            for file, row in zip(self.records, rows(), strict=True):
                np.save(file, row)

        def __getitem__(self, id: int) -> Any:
            return np.load(self.records[id])

    return Files()


@steady_entry(images)
def albumentations_resize() -> Any:
    import albumentations as A

    return A.Compose([A.Resize(16, 16), A.Normalize()])


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
