"""Common image transforms on bytes.

    encoded bytes ─▶ DecodeRandomResizedCrop ─▶ (ColorJitter, ...) ─▶ batch ─▶ device ─▶ Normalize

Images are uint8 arrays of shape (H, W, 3). Random numbers come from Python's generator, which stallfree seeds for each
sample. So a sample is the same function of (seed, epoch, id) in every process.
"""

from stallfree.vision.crops import DecodeRandomResizedCrop, RandomResizedCrop
from stallfree.vision.normalize import Normalize
from stallfree.vision.transforms import CenterCrop, ChannelsFirst, ColorJitter, RandomHorizontalFlip, Resize

__all__ = [
    "CenterCrop",
    "ChannelsFirst",
    "ColorJitter",
    "DecodeRandomResizedCrop",
    "Normalize",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Resize",
]
