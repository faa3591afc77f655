"""The everyday transforms on bytes."""

from __future__ import annotations

import pickle
import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from vision_data import distance, photograph

from stallfree.errors import InputError
from stallfree.pipeline.classify import split
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.vision import native
from stallfree.vision.normalize import Normalize
from stallfree.vision.transforms import CenterCrop, ChannelsFirst, ColorJitter, RandomHorizontalFlip, Resize

STEPS = [RandomHorizontalFlip(1), Resize(50), CenterCrop(60), ColorJitter(0.5, 0.5, 0.5), ChannelsFirst()]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: type(step).__name__)
def test_all_give_new_contiguous_bytes_and_change_nothing_that_they_get(step: Any, engine: str) -> None:
    pixels = photograph()
    before = pixels.copy()
    for view in (pixels, pixels[::-1, ::2], Image.fromarray(pixels)):
        out = step(view)
        assert out.dtype == np.uint8
        assert out.flags.c_contiguous
        assert not np.shares_memory(out, pixels)
        assert 3 in (out.shape[0], out.shape[2])
    assert (pixels == before).all()
    with pytest.raises(InputError, match="needs an image as uint8"):
        step(b"encoded")
    assert repr(pickle.loads(pickle.dumps(step))) == repr(step)


def test_which_are_random() -> None:
    verdicts = [split(step).verdicts[0] for step in STEPS]
    assert [verdict.random for verdict in verdicts] == [True, False, False, True, False]
    assert {verdict.reason for verdict in verdicts} == {"mark"}


def test_flips() -> None:
    pixels = photograph()
    random.seed(0)
    mirrored = 0
    for _ in range(200):
        out = RandomHorizontalFlip()(pixels)
        same = bool((out == pixels).all())
        assert same or (out == pixels[:, ::-1]).all()
        mirrored += not same
    assert mirrored == pytest.approx(100, abs=32)
    assert (RandomHorizontalFlip(0)(pixels) == pixels).all()


@pytest.mark.parametrize(("size", "shape"), [(60, (60, 85)), ((33, 44), (33, 44)), (240, (240, 340))])
def test_resize(size: Any, shape: tuple[int, int], engine: str) -> None:
    pixels = photograph()
    expected = np.asarray(Image.fromarray(pixels).resize(shape[::-1], Image.Resampling.BILINEAR))
    assert distance(Resize(size)(pixels), expected).max() <= 1
    tall = Resize(size)(pixels.transpose(1, 0, 2))
    assert tall.shape[:2] == (shape if isinstance(size, tuple) else shape[::-1])


def test_resize_tells_what_resizes(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.library() is None:
        pytest.skip("the compiled part is not there")
    before = fingerprint(Resize(8))
    assert before == fingerprint(Resize(8)) != fingerprint(Resize(9))
    monkeypatch.setattr(native, "library", lambda: None)
    assert fingerprint(Resize(8)) != before


def test_center_crop_pads_what_is_too_small() -> None:
    pixels = photograph(120, 170)
    np.testing.assert_array_equal(CenterCrop((20, 50))(pixels), pixels[50:70, 60:110])
    wide = CenterCrop((100, 201))(pixels)
    assert wide.shape == (100, 201, 3)
    np.testing.assert_array_equal(wide[:, 15:185], pixels[10:110])
    assert wide[:, :15].max() == wide[:, 185:].max() == 0


@pytest.mark.parametrize("factor", [0.0, 0.4, 30.0])
@pytest.mark.parametrize("kind", ["Brightness", "Contrast", "Color"])
def test_colours_change_as_in_pillow(factor: float, kind: str, engine: str) -> None:
    pixels = photograph()
    expected = np.asarray(getattr(ImageEnhance, kind)(Image.fromarray(pixels)).enhance(factor))
    name = {"Brightness": "brightness", "Contrast": "contrast", "Color": "saturation"}[kind]
    out = ColorJitter(**{name: (factor, factor)})(pixels)
    # Pillow rounds the grey, and cuts the result: 1, and the rounding of the grey times the factor.
    assert distance(out, expected).max() <= 1 + abs(1 - factor) / 2 + 0.5


def test_colours_change_at_random_in_random_order(engine: str) -> None:
    pixels = photograph(20, 30)
    results = set()
    for seed in range(50):
        random.seed(seed)
        once = ColorJitter(0.4, 0.4, 0.4)(pixels)
        random.seed(seed)
        np.testing.assert_array_equal(once, ColorJitter(0.4, 0.4, 0.4)(pixels))
        results.add(once.tobytes())
    assert len(results) == 50
    orders = {ColorJitter((2, 2), (0.2, 0.2), (0, 0))(pixels).tobytes() for _ in range(200)}
    assert len(orders) > 2
    assert (ColorJitter()(pixels) == pixels).all()


def test_channels_first() -> None:
    pixels = photograph()
    np.testing.assert_array_equal(ChannelsFirst()(pixels), pixels.transpose(2, 0, 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomHorizontalFlip(2),
        lambda: Resize(-1),
        lambda: Resize((1, 0)),
        lambda: CenterCrop("8"),  # type: ignore[arg-type]
        lambda: ColorJitter(-0.1),
        lambda: ColorJitter(contrast=(1, 0.5)),
        lambda: ColorJitter(saturation="much"),  # type: ignore[arg-type]
        lambda: Normalize(std=(1, 1, 0)),
        lambda: Normalize(mean=(1, 1)),
        lambda: Normalize(dtype=torch.uint8),
        lambda: Normalize(layout="NHWC"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_cannot_be(make: Any) -> None:
    with pytest.raises(InputError, match="give"):
        make()


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

    def test_travels(self) -> None:
        step = Normalize()
        image = torch.full((1, 2, 2, 3), 9, dtype=torch.uint8)
        torch.testing.assert_close(pickle.loads(pickle.dumps(step))(image), step(image))
