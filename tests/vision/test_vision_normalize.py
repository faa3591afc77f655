"""Normalisation of batches of bytes."""

from __future__ import annotations

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


class TestNormalize:
    MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

    def test_values_are_those_of_torchvision(self) -> None:
        batch = torch.from_numpy(np.stack([photograph(20, 30, seed) for seed in range(3)]))
        expected = ((batch.float() / 255 - self.MEAN) / self.STD).permute(0, 3, 1, 2)
        out = Normalize()(batch)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        assert out.is_contiguous(memory_format=torch.channels_last)
        planar = Normalize(layout="CHW", dtype=torch.float16)(batch.permute(0, 3, 1, 2).contiguous())
        assert planar.dtype == torch.float16
        assert planar.is_contiguous()
        torch.testing.assert_close(planar.float(), expected, atol=2e-3, rtol=2e-3)

    def test_pictures_are_found_wherever_they_are(self) -> None:
        image = torch.zeros(2, 4, 5, 3, dtype=torch.uint8)
        label = torch.tensor([1, 2], dtype=torch.uint8)
        pair = Normalize()(Pair(image, label))
        assert type(pair) is Pair
        assert pair.image.shape == (2, 3, 4, 5)
        assert pair.label is label
        found = Normalize()({"views": [image, image], "label": label, "name": "x"})
        assert [view.dtype for view in found["views"]] == [torch.float32] * 2
        assert (found["label"], found["name"]) == (label, "x")
        assert image.dtype == torch.uint8

    def test_what_cannot_be_normalised(self) -> None:
        with pytest.raises(InputError, match="got a list without a uint8 tensor of 4 dimensions"):
            Normalize()([torch.zeros(2, 4, 5, 3)])
        with pytest.raises(InputError, match="not 3 channels in this layout"):
            Normalize(layout="CHW")(torch.zeros(2, 4, 5, 3, dtype=torch.uint8))

    @pytest.mark.parametrize(
        "wrong", [{"std": (1, 1, 0)}, {"mean": (1, 1)}, {"dtype": torch.uint8}, {"layout": "NHWC"}], ids=str
    )
    def test_arguments_that_cannot_be(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(InputError, match="give"):
            Normalize(**wrong)

    def test_travels(self) -> None:
        step = Normalize()
        image = torch.full((1, 2, 2, 3), 9, dtype=torch.uint8)
        torch.testing.assert_close(pickle.loads(pickle.dumps(step))(image), step(image))
