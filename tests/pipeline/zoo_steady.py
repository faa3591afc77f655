"""Deterministic entries; some look random at first sight, and some are seeded, which may count as random."""

from __future__ import annotations

import io
import json
import logging
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
from torch import nn
from zoo_entry import either_entry, encoded, images, labelled, of_step, rows, steady_entry, tensors, texts

log = logging.getLogger(__name__)

RANDOM_CROP_SIZE = 32

# -- pictures --------------------------------------------------------------------------------------------------------


@steady_entry(encoded)
def decode_resize_normalise() -> Any:
    def decode(data: Any) -> Any:
        return Image.open(io.BytesIO(data)).convert("RGB")

    def resize(image: Any) -> Any:
        return image.resize((16, 16), Image.Resampling.BILINEAR)

    def normalise(image: Any) -> Any:
        return (np.asarray(image, np.float32) / 255 - 0.45) / 0.225

    return [decode, resize, normalise]


steady_entry(images)(
    lambda: lambda pixels: torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / 255), "to_tensor"
)


# -- arrays and tensors ----------------------------------------------------------------------------------------------


@steady_entry()
def normalise() -> Any:
    mean, deviation = np.zeros(64, np.float32) + 0.1, np.ones(64, np.float32)
    return lambda x: (x - mean) / deviation


def with_fixed_weights(*layers: nn.Module) -> nn.Module:
    network = nn.Sequential(*layers).eval().requires_grad_(False)
    for weights in network.parameters():
        weights.copy_(torch.linspace(-1, 1, weights.numel()).reshape(weights.shape))
    return network


@steady_entry(tensors)
def network_in_eval_mode() -> Any:
    return with_fixed_weights(
        nn.Unflatten(0, (1, 64)), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU()
    )


steady_entry(tensors)(lambda: lambda x: F.dropout(x, 0.5, training=False), "dropout_that_is_off")


@steady_entry(labelled)
def label_to_index() -> Any:
    class Encode:
        def __init__(self) -> None:
            self.classes = {label: place for place, label in enumerate(range(9, -1, -1))}

        def __call__(self, sample: Any) -> Any:
            x, label = sample
            return torch.as_tensor(x), self.classes[label]

    return Encode()


# -- text and files --------------------------------------------------------------------------------------------------


@steady_entry(texts)
def tokenise() -> Any:
    words: dict[str, int] = {}
    words.update({word: place for place, word in enumerate(["the", "quick", "brown", "fox", "jumps", "over"], 1)})
    return lambda text: torch.tensor([words.get(word, 0) for word in text.split()])


@steady_entry(texts)
def regular_expressions() -> Any:
    date = re.compile(r"(\d{4})-(\d\d)-(\d\d)")
    return lambda text: (re.sub(r"\s+", "_", text), [match.groups() for match in date.finditer(text)])


steady_entry(texts)(lambda: lambda text: json.loads(json.dumps({"text": text, "length": len(text)})), "json_and_back")


@steady_entry(texts)
def file_by_path() -> Any:
    folder = tempfile.TemporaryDirectory()
    file = pathlib.Path(folder.name) / "words.txt"
    file.write_text("the\nquick\nfox\n")

    class Count:
        def __init__(self) -> None:
            self.folder, self.file = folder, str(file)

        def __call__(self, text: str) -> Any:
            known = pathlib.Path(self.file).read_text().split()
            return sum(word in known for word in text.split())

    return Count()


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


either_entry()(lambda: lambda x: x[np.random.default_rng(0).permutation(len(x))], "permutation_with_a_constant_seed")


@of_step(either_entry(tensors))
def torch_with_a_constant_seed(x: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    return x[torch.randperm(64, generator=generator)]


either_entry()(
    lambda: lambda x: x + np.random.default_rng(zlib.crc32(x.tobytes())).normal(size=64), "seeded_by_content"
)


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
    class Scale:
        def __init__(self) -> None:
            self.out = np.empty(64, np.float32)

        def __call__(self, x: Any) -> Any:
            np.multiply(x, 3, out=self.out)
            return self.out.copy()

    return Scale()


@steady_entry(rows)
def changes_its_input() -> Any:
    def scale(x: Any) -> Any:
        x *= 2
        return x

    return [scale, scale]


@either_entry()
def measures_its_own_time() -> Any:
    class Timed:
        def __init__(self) -> None:
            self.seconds = 0.0

        def __call__(self, x: Any) -> Any:
            began = time.perf_counter()
            out = np.sort(x)
            self.seconds += time.perf_counter() - began
            return out

    return Timed()


@of_step(either_entry())
def draws_and_does_not_use_it(x: Any) -> Any:
    pyrandom.random()
    return np.sort(x)


@of_step(either_entry())
def seeds_the_global_generator_with_a_constant(x: Any) -> Any:
    np.random.seed(0)
    return x + np.random.normal(size=64)
