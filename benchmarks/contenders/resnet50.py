"""A residual network of 50 layers for pictures of 224x224 (He et al., CVPR 2016, table 1), to give a GPU work to do."""

from __future__ import annotations

import torch
from torch import nn


def _layer(entering: int, leaving: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(entering, leaving, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(leaving),
    ]


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1, with a way round."""

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        leaving = 4 * width
        self.body = nn.Sequential(
            *_layer(entering, width, 1),
            nn.ReLU(inplace=True),
            *_layer(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_layer(width, leaving, 1),
        )
        same = entering == leaving and stride == 1
        self.way_round = nn.Identity() if same else nn.Sequential(*_layer(entering, leaving, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(x) + self.way_round(x), inplace=True)


def make_resnet50(classes: int = 1000) -> nn.Module:
    """Takes (n, 3, 224, 224) floats."""
    parts: list[nn.Module] = [*_layer(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    entering = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            parts.append(Bottleneck(entering, width, stride if number == 0 else 1))
            entering = 4 * width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entering, classes))
