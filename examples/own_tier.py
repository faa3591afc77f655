"""A tier of one's own: samples as compressed files in a folder.

`tests/test_own_tier.py` checks it with `stallfree.testing.TierContract`.
"""

import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stallfree as sf
from stallfree.cache.records import MISS
from stallfree.cache.tier import decode


class CompressedFiles:
    """What `CachedDataset(store=...)` takes: a place for the samples of several data sets."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def attach(self, num_ids: int, *, fingerprint: str, name: str, example: Any) -> "CompressedSamples":
        return CompressedSamples(self.folder / fingerprint)


class CompressedSamples:
    """The samples of one data set: a `stallfree.cache.Tier`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get_many(self, ids: Any) -> list[Any]:
        return [self._read(self.folder / str(id)) for id in ids]

    def _read(self, file: Path) -> Any:
        try:
            return decode(zlib.decompress(file.read_bytes()))
        except FileNotFoundError:  # never stored, or dropped
            return MISS

    def put_many(self, ids: Any, records: Any) -> Any:
        for id, record in zip(ids, records, strict=True):
            if not (self.folder / str(id)).exists():
                with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                    file.write(zlib.compress(record, 1))
                Path(file.name).rename(self.folder / str(id))  # readers never see half of a file
        return np.ones(len(ids), bool)

    def drop(self, ids: Any) -> None:
        for id in ids:
            (self.folder / str(id)).unlink(missing_ok=True)

    def close(self) -> None:
        pass


class Scans(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Pictures with little in them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
        picture = torch.zeros(64, 64)
        picture[id] = id
        return picture, id


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = CompressedFiles(folder)
        with sf.CachedDataset(Scans(), capacity="256KiB", store=store) as cached:  # memory for 13 of the 64 pictures
            for _ in range(2):
                for pictures, ids in sf.DataLoader(cached, batch_size=8, shuffle=True):
                    assert (pictures.amax((1, 2)) == ids).all()
            stats = cached.stats()
    print(f"{stats.storage_reads} reads of the data set; {stats.tier_hits} of {stats.hits} hits came from the files")


if __name__ == "__main__":
    main()
