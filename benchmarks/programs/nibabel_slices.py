"""nibabel: one slice of a volume at random, with its labels."""

import random
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from torch.utils.data import Dataset

OPTIONS = {"batch_size": 4}


class RandomSlices(Dataset):
    def __init__(self, folder, size=48):
        self.images = sorted(Path(folder, "images").glob("*.nii.gz"))
        self.size = size

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        path = self.images[index]
        volume = nib.load(path).get_fdata(dtype=np.float32)
        labels = nib.load(path.parent.parent / "labels" / path.name)
        at = random.randrange(volume.shape[2])
        image = self.fit(volume[:, :, at])
        mask = self.fit(np.asarray(labels.dataobj[:, :, at]))
        image = (image - image.mean()) / (image.std() + 1e-6)
        if random.random() < 0.5:
            image, mask = image[::-1].copy(), mask[::-1].copy()
        image += np.random.normal(0, 0.05, image.shape).astype(np.float32)
        return torch.from_numpy(image)[None], torch.from_numpy(mask).long()

    def fit(self, plane):
        plane = plane[: self.size, : self.size]
        return np.pad(plane, [(0, self.size - side) for side in plane.shape])


def make(root):
    return RandomSlices(f"{root}/volumes")
