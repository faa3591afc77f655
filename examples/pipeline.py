"""Which part of a pipeline may be cached, under which key, and how augmentation stays reproducible."""

from __future__ import annotations

import random

import numpy as np

from stallfree.pipeline.classify import split
from stallfree.pipeline.compose import Compose, OnItem, mark_deterministic
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.pipeline.randomness import Randomness


@mark_deterministic
def decode(record: bytes) -> np.ndarray:
    """Stands for a real decoder; the mark spares the trial."""
    return np.frombuffer(record, np.uint8).reshape(8, 8)


def scale(image: np.ndarray) -> np.ndarray:
    """Not marked, so it is tried on one record."""
    return image.astype(np.float32) / 255


def flip(image: np.ndarray) -> np.ndarray:
    """Draws from Python's generator, which the trial notices."""
    return image[:, ::-1] if random.random() < 0.5 else image


record = (bytes(range(64)), "label")
pipeline = Compose([OnItem(0, Compose([decode, scale, flip]))])
parts = split(pipeline, probe=record)
print(parts)
print("key of the cached part:", fingerprint(parts.deterministic))

cached = parts.deterministic(record)
with Randomness(parts.random) as randomness:
    for epoch in range(3):
        row = []
        for id in range(8):
            randomness.seed(0, epoch, id)
            image, _ = parts.random(cached)
            row.append("flipped" if image[0, 0] > 0 else "plain")
        print(f"epoch {epoch}:", *row)
