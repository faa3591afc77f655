"""torchaudio: spoken words as mel spectrograms, with a random gain, a random shift and masks."""

import os
import random

import torch
import torchaudio.transforms as T
from scipy.io import wavfile
from torch.utils.data import Dataset

OPTIONS = {"batch_size": 16}


class Words(Dataset):
    def __init__(self, folder, length=8000):
        self.folder = folder
        self.files = sorted(name for name in os.listdir(folder) if name.endswith(".wav"))
        self.length = length
        self.to_mel = T.MelSpectrogram(sample_rate=8000, n_fft=256, hop_length=80, n_mels=40)
        self.masks = torch.nn.Sequential(T.FrequencyMasking(8), T.TimeMasking(20))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        _, samples = wavfile.read(os.path.join(self.folder, self.files[index]))
        wave = torch.from_numpy(samples.copy()).float()[None] / 32768
        wave = wave[:, : self.length]
        wave = torch.nn.functional.pad(wave, (0, self.length - wave.shape[1]))
        wave = torch.roll(wave, random.randint(-800, 800), dims=1) * random.uniform(0.5, 1.5)
        mel = self.masks(self.to_mel(wave).clamp(min=1e-5).log())
        return mel, int(self.files[index][0])


def make(root):
    return Words(f"{root}/words")
