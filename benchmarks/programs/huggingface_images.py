"""Hugging Face: an image folder with `set_transform` and the sizes of an image processor, as to train a ViT."""

import torch
from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor
from transformers import ViTImageProcessor

from datasets import load_dataset


def collate(examples):
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    labels = torch.tensor([example["label"] for example in examples])
    return {"pixel_values": pixel_values, "labels": labels}


OPTIONS = {"batch_size": 16, "collate_fn": collate}


def make(root):
    dataset = load_dataset("imagefolder", data_dir=f"{root}/photos", split="train", cache_dir=f"{root}/huggingface")
    processor = ViTImageProcessor(size={"height": 160, "width": 160})
    augment = Compose(
        [
            RandomResizedCrop((processor.size["height"], processor.size["width"])),
            RandomHorizontalFlip(),
            ToTensor(),
            Normalize(processor.image_mean, processor.image_std),
        ]
    )

    def transform(batch):
        batch["pixel_values"] = [augment(image.convert("RGB")) for image in batch.pop("image")]
        return batch

    dataset.set_transform(transform)
    return dataset
