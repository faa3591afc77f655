"""Cache a torchvision data set as it is: its transform is taken apart by itself. Wants `pip install torchvision`.

What comes before the first random step is done once and kept; the rest runs anew in each epoch.
"""

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision import datasets
from torchvision.transforms import v2

import stallfree as sf


def make_pictures(root: Path) -> None:
    """Sixteen noisy pictures of two classes."""
    generator = np.random.default_rng(0)
    for number in range(16):
        path = root / ("cat" if number % 2 else "dog") / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (96, 128, 3), np.uint8)).save(path)


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        make_pictures(Path(root))
        transform = v2.Compose([v2.Resize((32, 32)), v2.PILToTensor(), v2.RandomHorizontalFlip()])
        pictures = datasets.ImageFolder(root, transform)
        with sf.CachedDataset(pictures, capacity="8MiB") as data:
            print(data.decision)
            print(sf.split(data.steps))
            with sf.DataLoader(data, batch_size=8, shuffle=True, num_workers=2) as loader:
                for epoch in range(3):
                    brightness = sum(float(images.float().mean()) for images, _ in loader) / len(loader)
                    stats = data.stats()
                    print(f"epoch {epoch}: mean brightness {brightness:.1f}, {stats.storage_reads} files read so far")


if __name__ == "__main__":
    main()
