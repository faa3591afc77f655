"""Seconds from the creation of a loader to its first batch, in this process."""

from __future__ import annotations

import io
import json
import random
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from PIL import Image

import stallfree as sf
from benchmarks.contender import emit

COUNT = 4000


class Samples(torch.utils.data.Dataset[Any]):
    """Samples of one shape: made in memory, or decoded from JPEG bytes."""

    def __init__(self, shape: str) -> None:
        self.shape = shape
        rng = np.random.default_rng(0)
        self.tiny = torch.from_numpy(rng.random((COUNT, 4), np.float32))
        self.floats = torch.from_numpy(rng.random((8, 3, 224, 224), np.float32))
        out = io.BytesIO()
        small = Image.fromarray(rng.integers(0, 255, (60, 80, 3), np.uint8))
        small.resize((640, 480)).save(out, "JPEG", quality=90)
        self.encoded = out.getvalue()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> Any:
        if self.shape == "tuples":
            return self.tiny[id], id
        if self.shape == "floats":
            return self.floats[id % 8], id
        left, top = random.randrange(200), random.randrange(100)
        picture = Image.open(io.BytesIO(self.encoded)).convert("RGB").crop((left, top, left + 400, top + 300))
        return torch.from_numpy(np.array(picture.resize((224, 224)))), id


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    data = Samples(given["shape"])
    make: Any = torch.utils.data.DataLoader if given["loader"] == "torch" else sf.DataLoader
    began = time.perf_counter()
    loader = make(data, batch_size=64, shuffle=True, num_workers=given["workers"])
    batches = iter(loader)
    pictures, ids = next(batches)
    seconds = time.perf_counter() - began
    assert len(ids) == len(pictures) == 64
    del batches
    emit({"seconds": seconds}, torch=torch.__version__, stallfree=version("stallfree"), numpy=np.__version__)


if __name__ == "__main__":
    main()
