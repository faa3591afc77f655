"""timm: `create_dataset` with the transform of its training script, RandAugment and random erasing."""

from timm.data import create_dataset, create_transform

OPTIONS = {"batch_size": 16}


def make(root):
    dataset = create_dataset("", root=f"{root}/photos", is_training=True)
    dataset.transform = create_transform(
        input_size=160, is_training=True, auto_augment="rand-m7-mstd0.5", re_prob=0.25, re_mode="pixel"
    )
    return dataset
