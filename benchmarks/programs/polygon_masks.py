"""Pillow and NumPy: a photograph and the polygons of its objects in a JSON file, cut at the same random place."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.utils.data import Dataset

OPTIONS = {"batch_size": 8}


class Polygons(Dataset):
    def __init__(self, root, crop=160):
        self.root = Path(root)
        self.names = sorted(path.stem for path in (self.root / "polygons").iterdir())
        self.crop = crop

    def __len__(self):
        return len(self.names)

    def __getitem__(self, idx):
        name = self.names[idx]
        with open(self.root / "polygons" / f"{name}.json", encoding="utf-8") as f:
            annotation = json.load(f)
        image = Image.open(self.root / annotation["image"]).convert("RGB")
        mask = Image.new("L", image.size)
        draw = ImageDraw.Draw(mask)
        for shape in annotation["shapes"]:
            draw.polygon([tuple(point) for point in shape["points"]], fill=shape["label"])
        left = random.randint(0, image.width - self.crop)
        top = random.randint(0, image.height - self.crop)
        box = (left, top, left + self.crop, top + self.crop)
        image, mask = np.array(image.crop(box)), np.array(mask.crop(box))
        if random.random() > 0.5:
            image, mask = image[:, ::-1], mask[:, ::-1]
        image = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1).float() / 255
        return image, torch.from_numpy(np.ascontiguousarray(mask)).long()


def make(root):
    return Polygons(root)
