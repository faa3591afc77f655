"""Normalisation of batches of bytes."""

import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from vision_data import photograph

from stallfree.errors import InputError
from stallfree.vision import Normalize

Pair = namedtuple("Pair", ["image", "label"])
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def test_values_are_those_of_torchvision() -> None:
    batch = torch.from_numpy(np.stack([photograph(20, 30, seed) for seed in range(3)]))
    expected = ((batch.float() / 255 - MEAN) / STD).permute(0, 3, 1, 2)
    step = Normalize()
    for out in (step(batch), pickle.loads(pickle.dumps(step))(batch)):
        assert torch.allclose(out, expected, atol=1e-5, rtol=1e-5)
        assert out.is_contiguous(memory_format=torch.channels_last)
    planar = Normalize(layout="CHW", dtype=torch.float16)(batch.permute(0, 3, 1, 2).contiguous())
    assert planar.dtype == torch.float16
    assert planar.is_contiguous()
    assert torch.allclose(planar.float(), expected, atol=2e-3, rtol=2e-3)


def test_pictures_are_found_wherever_they_are() -> None:
    image, label = torch.zeros(2, 4, 5, 3, dtype=torch.uint8), torch.tensor([1, 2], dtype=torch.uint8)
    batch = Normalize()({"views": [image, image], "pair": Pair(image, label), "name": "x"})
    assert [view.dtype for view in batch["views"]] == [torch.float32] * 2
    assert type(batch["pair"]) is Pair
    assert batch["pair"].image.shape == (2, 3, 4, 5)
    assert batch["pair"].label is label
    assert batch["name"] == "x"
    assert image.dtype == torch.uint8


def test_what_cannot_be_normalised() -> None:
    with pytest.raises(InputError, match="got a list without a uint8 tensor of 4 dimensions"):
        Normalize()([torch.zeros(2, 4, 5, 3)])
    with pytest.raises(InputError, match="not 3 channels in this layout"):
        Normalize(layout="CHW")(torch.zeros(2, 4, 5, 3, dtype=torch.uint8))
    wrong: list[dict[str, Any]] = [{"std": (1, 1, 0)}, {"mean": (1, 1)}, {"dtype": torch.uint8}, {"layout": "NHWC"}]
    for arguments in wrong:
        with pytest.raises(InputError, match="give"):
            Normalize(**arguments)
