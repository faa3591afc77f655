"""Entries that are deterministic, as everyday pipelines have them; some look random at first sight."""

from __future__ import annotations

import base64
import bisect
import collections
import csv
import datetime
import functools
import hashlib
import io
import json
import logging
import operator
import pathlib
import re
import string
import struct
import tempfile
import time
import unicodedata
import uuid
import zlib
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from zoo_entry import encoded, images, labelled, named, steady_entry, tensors, texts

log = logging.getLogger(__name__)

RANDOM_CROP_SIZE = 32

# -- pictures --------------------------------------------------------------------------------------------------------


@steady_entry(encoded)
def decode() -> Any:
    return lambda data: np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


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
def thumbnail() -> Any:
    def thumbnail(pixels: Any) -> Any:
        image = Image.fromarray(pixels)
        image.thumbnail((12, 12))
        return np.asarray(image)

    return thumbnail


@steady_entry(images)
def grey_image_of_pillow() -> Any:
    return lambda pixels: Image.fromarray(pixels).convert("L")


@steady_entry(images)
def centre_crop() -> Any:
    @dataclass(frozen=True)
    class CentreCrop:
        size: int = 16

        def __call__(self, pixels: Any) -> Any:
            top, left = ((side - self.size) // 2 for side in pixels.shape[:2])
            return pixels[top : top + self.size, left : left + self.size].copy()

    return CentreCrop()


@steady_entry(images)
def to_tensor() -> Any:
    return lambda pixels: torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / 255)


@steady_entry(images)
def histogram() -> Any:
    return lambda pixels: np.stack([np.histogram(pixels[..., c], 16, (0, 256))[0] for c in range(3)])


# -- arrays and tensors ----------------------------------------------------------------------------------------------


@steady_entry()
def normalise() -> Any:
    mean, deviation = np.zeros(64, np.float32) + 0.1, np.ones(64, np.float32)
    return lambda x: (x - mean) / deviation


@steady_entry()
def clip_by_partial() -> Any:
    return functools.partial(np.clip, a_min=-1, a_max=1)


@steady_entry()
def cast_by_methodcaller() -> Any:
    return operator.methodcaller("astype", np.float16)


@steady_entry(named)
def item_by_itemgetter() -> Any:
    return [operator.itemgetter("x"), lambda x: x[::-1].copy()]


@steady_entry()
def negated_by_a_builtin() -> Any:
    return operator.neg


@steady_entry()
def pad_and_one_hot() -> Any:
    return lambda x: (np.pad(x, 3), np.eye(10, dtype=np.float32)[int(x[0]) % 10])


@steady_entry()
def spectrogram() -> Any:
    window = np.hanning(16)

    def spectrogram(x: Any) -> Any:
        frames = np.stack([x[start : start + 16] * window for start in range(0, 49, 8)])
        return np.log1p(np.abs(np.fft.rfft(frames))).astype(np.float32)

    return spectrogram


@steady_entry()
def resample_of_scipy() -> Any:
    from scipy import ndimage, signal

    return lambda x: ndimage.gaussian_filter1d(signal.resample(x, 40), 2.0)


@steady_entry(tensors)
def softmax_and_sort() -> Any:
    return lambda x: torch.sort(F.softmax(x, 0), descending=True).values


@steady_entry(tensors)
def top_k() -> Any:
    return lambda x: torch.topk(x, 5)[1]


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
def network_behind_a_function() -> Any:
    network = with_fixed_weights(nn.Unflatten(0, (1, 64)), nn.Conv1d(1, 4, 3), nn.Dropout(0.1))

    def features(x: Any) -> Any:
        with torch.no_grad():
            return network(x)

    return features


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


@steady_entry()
def nested_result() -> Any:
    return lambda x: {"values": [x, x * 2], "sum": float(x.sum()), "none": None}


@steady_entry()
def rank_by_bisect() -> Any:
    borders = np.linspace(-2, 2, 17).tolist()
    return lambda x: [bisect.bisect(borders, value) for value in x.tolist()]


# -- text and files --------------------------------------------------------------------------------------------------


@steady_entry(texts)
def tokenise() -> Any:
    words: dict[str, int] = {}
    words.update({word: place for place, word in enumerate(["the", "quick", "brown", "fox", "jumps", "over"], 1)})
    return lambda text: torch.tensor([words.get(word, 0) for word in text.split()])


@steady_entry(texts)
def bag_of_words() -> Any:
    return lambda text: sorted(collections.Counter(text.split()).items())


@steady_entry(texts)
def regular_expressions() -> Any:
    date = re.compile(r"(\d{4})-(\d\d)-(\d\d)")
    return lambda text: (re.sub(r"\s+", "_", text), [match.groups() for match in date.finditer(text)])


@steady_entry(texts)
def unicode_and_case() -> Any:
    return lambda text: unicodedata.normalize("NFKD", text).casefold().translate(str.maketrans("", "", string.digits))


@steady_entry(texts)
def words_that_are_known() -> Any:
    stop = {"the", "a", "over"}
    return lambda text: [word for word in text.split() if word not in stop]


@steady_entry(texts)
def json_and_back() -> Any:
    return lambda text: json.loads(json.dumps({"text": text, "length": len(text)}))


@steady_entry(texts)
def table_of_csv() -> Any:
    return lambda text: next(csv.reader([text.replace(" ", ",")]))


@steady_entry(texts)
def digest() -> Any:
    return lambda text: hashlib.sha256(text.encode()).hexdigest()


@steady_entry(texts)
def uuid_of_a_name() -> Any:
    return lambda text: str(uuid.uuid5(uuid.NAMESPACE_DNS, text))


@steady_entry(texts)
def compress() -> Any:
    return lambda text: (zlib.compress(text.encode()), base64.b64encode(text.encode()))


@steady_entry()
def pack() -> Any:
    return lambda x: struct.pack("<64f", *x.tolist())


@steady_entry(texts)
def dates() -> Any:
    def dates(text: str) -> Any:
        found = [datetime.datetime.strptime(word, "%Y-%m-%d") for word in text.split() if word == "2024-03-01"]
        return [date.timestamp() for date in found], time.strftime("%Y-%m-%d", time.gmtime(len(text)))

    return dates


@steady_entry(texts)
def exact_numbers() -> Any:
    return lambda text: str(sum((Decimal(len(word)) / 3 for word in text.split()), Decimal(0)))


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
