"""torchvision v2 and pandas: a table names the photographs and their labels."""

import os

import pandas as pd
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import v2

OPTIONS = {"batch_size": 16}


class LabelledPhotos(Dataset):
    def __init__(self, table, root, transform=None):
        self.table = pd.read_csv(table)
        self.root = root
        self.transform = transform

    def __len__(self):
        return len(self.table)

    def __getitem__(self, idx):
        row = self.table.iloc[idx]
        image = Image.open(os.path.join(self.root, row["file"])).convert("RGB")
        if self.transform:
            image = self.transform(image)
        return {"image": image, "label": int(row["label"]), "name": row["file"]}


def make(root):
    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(160, antialias=True),
            v2.TrivialAugmentWide(),
            v2.ToDtype(torch.float32, scale=True),
            v2.RandomErasing(p=0.3),
        ]
    )
    return LabelledPhotos(f"{root}/labels.csv", f"{root}/photos", transform)
