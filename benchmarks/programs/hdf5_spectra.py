"""h5py: all samples in one HDF5 file, which each worker opens when it first needs it."""

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset

OPTIONS = {"batch_size": 16}


class Spectra(Dataset):
    def __init__(self, path):
        self.path = path
        self.file = None
        with h5py.File(path, "r") as file:
            self.length = len(file["spectra"])

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        spectrum = self.file["spectra"][idx].astype(np.float32)
        spectrum = np.roll(spectrum, np.random.randint(-5, 6)) * np.random.uniform(0.9, 1.1)
        return torch.from_numpy(spectrum.astype(np.float32)), int(self.file["labels"][idx])


def make(root):
    return Spectra(f"{root}/spectra.h5")
