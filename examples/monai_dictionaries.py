"""MONAI's dictionary transforms on a cache: volumes are loaded and scaled once, augmentation is fresh in each epoch.

Wants `pip install monai`. The random transforms are known by MONAI's own sign, so nothing is marked here.
"""

import tempfile
from pathlib import Path

import numpy as np
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, RandFlipd, RandGaussianNoised, ScaleIntensityd

import stallfree as sf


def make_volumes(folder: Path) -> list[dict[str, str]]:
    """Eight noisy volumes with the part that is bright marked, as `.npy`; NIfTI and DICOM work alike."""
    generator = np.random.default_rng(0)
    samples = []
    for number in range(8):
        volume = generator.random((24, 24, 24), np.float32)
        sample = {"image": str(folder / f"image{number}.npy"), "label": str(folder / f"label{number}.npy")}
        np.save(sample["image"], volume)
        np.save(sample["label"], (volume > 0.9).astype(np.uint8))
        samples.append(sample)
    return samples


def main() -> None:
    keys = ["image", "label"]
    transform = Compose(
        [
            LoadImaged(keys, reader="NumpyReader"),
            EnsureChannelFirstd(keys, channel_dim="no_channel"),
            ScaleIntensityd("image"),
            RandFlipd(keys, prob=0.5, spatial_axis=0),
            RandGaussianNoised("image", prob=0.5),
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        samples = make_volumes(Path(folder))
        with sf.CachedDataset(samples, capacity="16MiB", form="prepared", transform=transform) as data:
            print(sf.split(data.steps))
            with sf.DataLoader(data, batch_size=4, shuffle=True, num_workers=2) as loader:
                for epoch in range(3):
                    noise = sum(float(batch["image"].std()) for batch in loader) / len(loader)
                    stats = data.stats()
                    print(f"epoch {epoch}: {noise:.4f} noise; {stats.hits} hits, {stats.misses} misses so far")


if __name__ == "__main__":
    main()
