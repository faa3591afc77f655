"""Entries that are deterministic, as everyday pipelines have them; some look random at first sight."""

from __future__ import annotations

import io
import json
import logging
import pathlib
import re
import tempfile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from zoo_entry import encoded, images, labelled, steady_entry, tensors, texts

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


@steady_entry(images)
def to_tensor() -> Any:
    return lambda pixels: torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / 255)


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


@steady_entry(tensors)
def dropout_that_is_off() -> Any:
    return lambda x: F.dropout(x, 0.5, training=False)


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


@steady_entry(texts)
def json_and_back() -> Any:
    return lambda text: json.loads(json.dumps({"text": text, "length": len(text)}))


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
