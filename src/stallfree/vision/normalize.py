"""Converts bytes to normalised floats on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stallfree.errors import InputError, transform_input
from stallfree.pytree import take_apart
from stallfree.vision.crops import check_layout
from stallfree.vision.native import Layout


class Normalize:
    """Computes `(pixels / 255 - mean) / std` of batches of bytes.

    Made for `transform_on_device` of `DevicePrefetcher`.

    All uint8 tensors of 4 dimensions in a batch, also in nested containers, become floats of shape
    (N, 3, H, W). Everything else is unchanged. With "HWC" the result has torch's memory format `channels_last`,
    without a copy.

    Args:
        mean, std: mean and standard deviation of red, green and blue, on a scale of 0 to 1; ImageNet's by default.
        layout: layout of the bytes: "HWC", (N, H, W, 3), or "CHW", (N, 3, H, W).
        dtype: dtype of the floats.

    Raises `InputError` for invalid arguments, and for a batch without such a tensor.

    Example:
        ```python
        normalize = sf.vision.Normalize()  # as `transform_on_device` of a `DevicePrefetcher`
        pixels = normalize(torch.zeros(4, 16, 16, 3, dtype=torch.uint8))
        assert pixels.shape == (4, 3, 16, 16)
        ```
    """

    def __init__(
        self,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        *,
        layout: Layout = "HWC",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        try:
            self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        except (TypeError, ValueError):
            self.mean = self.std = ()
        if len(self.mean) != 3 or len(self.std) != 3 or not all(value > 0 for value in self.std):
            raise InputError(f"mean={mean!r:.80}, std={std!r:.80}: give three numbers each, those of std above 0")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(f"dtype={dtype!r:.80}: give a type of floats, such as torch.float32")
        self.layout, self.dtype = check_layout(layout), dtype
        self._constants: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, batch: Any) -> Any:
        leaves, rebuild = take_apart(batch)
        images = [isinstance(leaf, torch.Tensor) and leaf.dtype == torch.uint8 and leaf.ndim == 4 for leaf in leaves]
        if not any(images):
            raise transform_input(
                f"{self!r} got a {type(batch).__name__} without a uint8 tensor of 4 dimensions: apply it to batches of "
                "the loader, and let the steps before it return bytes"
            )
        return rebuild([self._floats(leaf) if found else leaf for leaf, found in zip(leaves, images, strict=True)])

    def _floats(self, pixels: torch.Tensor) -> torch.Tensor:
        first = pixels.permute(0, 3, 1, 2) if self.layout == "HWC" else pixels
        if first.shape[1] != 3:
            raise transform_input(
                f"{self!r} got images of shape {tuple(pixels.shape)}, which are not 3 channels in this layout: give "
                "their layout"
            )
        if pixels.device not in self._constants:
            mean, std = (torch.tensor(value, device=pixels.device).view(3, 1, 1) for value in (self.mean, self.std))
            self._constants[pixels.device] = 1 / (255 * std), -mean / std
        scale, shift = self._constants[pixels.device]
        return first.to(torch.float32).mul_(scale).add_(shift).to(self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_constants": {}}

    def __repr__(self) -> str:
        return f"Normalize({self.mean}, {self.std}, layout={self.layout!r}, dtype={self.dtype})"
