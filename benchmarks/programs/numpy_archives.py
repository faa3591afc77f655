"""NumPy: features in one `.npz` file per sample, a random piece of which is taken and disturbed."""

import glob

import numpy as np
import torch
from torch.utils.data import Dataset

OPTIONS = {"batch_size": 16}


class Features(Dataset):
    def __init__(self, folder, frames=64):
        self.files = sorted(glob.glob(f"{folder}/*.npz"))
        self.frames = frames

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        with np.load(self.files[i]) as archive:
            features, label = archive["features"], archive["label"]
        start = np.random.randint(len(features) - self.frames + 1)
        features = features[start : start + self.frames] + 0.1 * np.random.randn(self.frames, features.shape[1])
        if torch.rand(1) < 0.5:
            first = torch.randint(0, self.frames - 8, (1,)).item()
            features[first : first + 8] = 0
        return features.astype(np.float32), int(label)


def make(root):
    return Features(f"{root}/features")
