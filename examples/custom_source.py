"""A source of your own: fetching apart from preparing, so that one runs ahead in threads and the other is cached."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import stallfree as sf
from stallfree.pipeline.compose import Source, Transform


class Frames:
    """Frames of fixed size in one large file.

    `fetch` does the I/O and nothing else, and is called by several threads. `pipeline` does the rest.
    """

    def __init__(self, path: Path, frame_bytes: int, steps: Sequence[Transform]) -> None:
        self.path = path
        self.frame_bytes = frame_bytes
        self.pipeline = sf.Compose(steps)

    def __len__(self) -> int:
        return self.path.stat().st_size // self.frame_bytes

    def __getitem__(self, id: int) -> Any:
        return self.pipeline(self.fetch(id))

    def fetch(self, id: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(id * self.frame_bytes)
            return file.read(self.frame_bytes)

    def where(self, id: int) -> str:
        return f"{self.path}, frame {id}"

    def fingerprint(self) -> str:
        return f"Frames {self.path} {self.path.stat().st_size} {self.frame_bytes}"


def decode(frame: bytes) -> npt.NDArray[np.uint8]:
    """Bytes to a picture."""
    picture: npt.NDArray[np.uint8] = np.frombuffer(frame, np.uint8).reshape(16, 16).copy()
    return picture


with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "frames.raw")
    file.write_bytes(bytes(number % 256 for number in range(64 * 256)))
    frames = Frames(file, frame_bytes=256, steps=[decode])
    source: Source = frames  # a type checker says what is missing
    with sf.CachedDataset(source, capacity="1MiB") as data, sf.DataLoader(data, batch_size=16, num_workers=2) as loader:
        print(data.decision)
        for _ in range(2):
            for batch in loader:
                assert (batch == batch[0]).all()
        print(f"shape of a batch: {tuple(batch.shape)}")
        print(f"{data.stats().storage_reads} reads for {data.stats().hits + data.stats().misses} samples")
        print("messages say where a sample lies:", data.where(5).split("/")[-1])
