"""torch: tensors that an earlier run has saved, one dictionary per file."""

from pathlib import Path

import torch
from torch.utils.data import Dataset

OPTIONS = {"batch_size": 16}


class Clips(Dataset):
    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*.pt"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        saved = torch.load(self.paths[index], weights_only=True)
        frames, label = saved["frames"], saved["label"]
        first = torch.randint(0, frames.shape[0] - 7, ()).item()
        clip = frames[first : first + 8].float().div(255)
        if torch.rand(()) < 0.5:
            clip = clip.flip(-1)
        clip = clip * torch.empty(()).uniform_(0.8, 1.2) + 0.02 * torch.randn_like(clip)
        return clip, label


def make(root):
    return Clips(f"{root}/clips")
