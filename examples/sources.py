"""Read pictures from a folder, then once more behind slow storage."""

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from stallfree.sources.files import ImageFolder
from stallfree.testing import ThrottledSource


def make_pictures(root: Path) -> None:
    """Four noisy pictures, two of each class."""
    generator = np.random.default_rng(0)
    for name in ("cat/0.jpg", "cat/1.jpg", "dog/0.jpg", "dog/1.jpg"):
        (root / name).parent.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(root / name)


with tempfile.TemporaryDirectory() as folder:
    make_pictures(Path(folder))
    pictures = ImageFolder(folder, transform=lambda image: image[::2, ::2])

    image, label = pictures[2]
    print(f"{len(pictures)} pictures of {pictures.classes}; sample 2: {pictures.classes[label]}, shape {image.shape}")

    record, label = pictures.fetch(2)  # only the I/O: the file's bytes
    print(f"as fetched it has {len(record)} bytes; the pipeline makes the sample: {pictures.pipeline}")

    slow = ThrottledSource(pictures, bandwidth="1MB/s", latency=0.002)
    for id in range(len(slow)):
        slow[id]
    print(f"slow storage served {slow.requests} requests and {slow.bytes} bytes")
    slow.close()
