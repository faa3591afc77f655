"""MONAI: volumes and labels by name, with random patches around the labels."""

import glob

from monai.data import Dataset, list_data_collate
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    LoadImaged,
    NormalizeIntensityd,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandGaussianNoised,
    RandShiftIntensityd,
    SpatialPadd,
)

OPTIONS = {"batch_size": 2, "collate_fn": list_data_collate}


def make(root):
    images = sorted(glob.glob(f"{root}/volumes/images/*.nii.gz"))
    labels = sorted(glob.glob(f"{root}/volumes/labels/*.nii.gz"))
    keys = ["image", "label"]
    transform = Compose(
        [
            LoadImaged(keys),
            EnsureChannelFirstd(keys),
            NormalizeIntensityd("image", nonzero=True),
            SpatialPadd(keys, (32, 32, 32)),
            RandCropByPosNegLabeld(keys, label_key="label", spatial_size=(32, 32, 32), pos=1, neg=1, num_samples=2),
            RandFlipd(keys, prob=0.5, spatial_axis=0),
            RandGaussianNoised("image", prob=0.5),
            RandShiftIntensityd("image", offsets=0.1, prob=0.5),
        ]
    )
    files = [{"image": image, "label": label} for image, label in zip(images, labels, strict=True)]
    return Dataset(files, transform)
