"""Train on WebDataset's tar shards in any order, with a cache: no conversion, each header read once.

The shards are written here with Python's own `tarfile`; webdataset's `ShardWriter` makes the same.
"""

import io
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import stallfree as sf
from stallfree.sources.tar import TarDataset


def write_shards(folder: Path) -> None:
    """Three shards with 32 pictures and their labels each: `00017.jpg` and `00017.cls` are one sample."""
    generator = np.random.default_rng(0)
    for shard in range(3):
        with tarfile.open(folder / f"train-{shard:03}.tar", "w") as tar:
            for number in range(shard * 32, shard * 32 + 32):
                picture = io.BytesIO()
                Image.fromarray(generator.integers(0, 256, (48, 48, 3), np.uint8)).save(picture, "JPEG")
                for extension, data in (("jpg", picture.getvalue()), ("cls", b"%d" % (number % 10))):
                    member = tarfile.TarInfo(f"{number:05}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder))
        steps = sf.Compose([sf.OnItem(0, sf.DecodeImage()), sf.OnItem(1, int)])
        data = TarDataset(f"{folder}/train-{{000..002}}.tar", steps, keys=("jpg", "cls"), index=folder)
        print(f"{data}; sample 40 lies in {data.where(40).removeprefix(folder)}")
        with (
            sf.CachedDataset(data, capacity="8MiB") as cached,
            sf.DataLoader(cached, batch_size=24, shuffle=True, num_workers=2) as loader,
        ):
            for epoch in range(2):
                seen = sum(len(labels) for _, labels in loader)
                print(f"epoch {epoch}: {seen} samples; {cached.stats().storage_reads} reads from the shards so far")


if __name__ == "__main__":
    main()
