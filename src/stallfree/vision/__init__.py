"""Crops of images on bytes, decoded in part, and normalisation on the device.

    encoded bytes ─▶ DecodeRandomResizedCrop ─▶ batch ─▶ device ─▶ Normalize

Images are uint8 arrays of shape (H, W, 3). Random numbers come from Python's generator, which stallfree seeds for each
sample. So a sample is the same function of (seed, epoch, id) in every process.
"""

from stallfree.vision.crops import DecodeRandomResizedCrop, DecodeResizeCenterCrop, Normalize, RandomResizedCrop

__all__ = ["DecodeRandomResizedCrop", "DecodeResizeCenterCrop", "Normalize", "RandomResizedCrop"]
