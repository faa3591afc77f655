"""OpenCV and albumentations: the photograph is opened by the C++ library itself."""

import glob
import os

import albumentations as A
import cv2
from albumentations.pytorch import ToTensorV2
from torch.utils.data import Dataset

OPTIONS = {"batch_size": 16}


class Photos(Dataset):
    def __init__(self, folder, transform):
        self.paths = sorted(glob.glob(os.path.join(folder, "*", "*.jpg")))
        self.classes = sorted({path.split(os.sep)[-2] for path in self.paths})
        self.transform = transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, idx):
        path = self.paths[idx]
        image = cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB)
        image = self.transform(image=image)["image"]
        return image, self.classes.index(path.split(os.sep)[-2])


def make(root):
    transform = A.Compose(
        [
            A.RandomResizedCrop(size=(160, 160)),
            A.HorizontalFlip(p=0.5),
            A.RandomBrightnessContrast(p=0.5),
            A.CoarseDropout(p=0.3),
            A.Normalize(),
            ToTensorV2(),
        ]
    )
    return Photos(f"{root}/photos", transform)
