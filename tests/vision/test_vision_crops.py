"""Parts of pictures: which ones, what they look like, that decoding only the part changes nothing; normalisation; and
random steps that name their halves: the first one may be cached.
"""

import math
import pickle
import random
from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn.functional import interpolate
from vision_data import distance, encode, kinds, needs_library, photograph, seeded

import stallfree as sf
from stallfree.pipeline.compose import mark_of
from stallfree.vision import crops
from stallfree.vision.crops import Crop, Normalize, RandomResizedCrop

JPEG = encode(photograph(), quality=90)
KINDS = kinds(photograph(), photograph(300, 400))
del KINDS["large"]  # it would be decoded at half its resolution
LAYOUTS: dict[str, Any] = {kind: "CHW" if kind in ("4:2:0", "odd", "PNG") else "HWC" for kind in KINDS}
IN_PART = [name for name in KINDS if name not in ("CMYK", "PNG")]

Numbers = npt.NDArray[np.float64]


def drawn(step: RandomResizedCrop | sf.DecodeRandomResizedCrop, count: int, height: int, width: int) -> list[Crop]:
    random.seed(1)
    return [step.draw(height, width)[0] for _ in range(count)]


def model(count: int, height: int, width: int, scale: Any, ratio: Any) -> Iterator[Crop]:
    """Parts as torchvision's documentation says: a random area and aspect ratio, 10 tries, then a central part."""
    rng = np.random.default_rng(2)
    for _ in range(count):
        areas = rng.uniform(*scale, 10) * height * width
        aspects = np.exp(rng.uniform(*np.log(ratio), 10))
        w, h = np.round(np.sqrt(areas * aspects)), np.round(np.sqrt(areas / aspects))
        fits = np.flatnonzero((w <= width) & (h <= height))
        if len(fits):
            at = fits[0]
            yield Crop(int(rng.integers(0, height - h[at] + 1)), int(rng.integers(0, width - w[at] + 1)), h[at], w[at])
        else:
            aspect = min(max(width / height, ratio[0]), ratio[1])
            w, h = min(width, round(height * aspect)), min(height, round(width / aspect))
            yield Crop((height - h) // 2, (width - w) // 2, h, w)


def figures(parts: list[Crop], height: int, width: int) -> dict[str, Numbers]:
    top, left, h, w = np.array(parts, np.float64).T
    room = np.maximum([height - h, width - w], 1)
    return {"area": h * w, "ratio": np.log(w / h), "top": top / room[0], "left": left / room[1], "bottom": top + h}


def gap(a: Numbers, b: Numbers) -> float:
    """The statistic of Kolmogorov and Smirnov: the largest gap between two distribution functions."""
    at = np.concatenate([a, b])
    shares = (np.searchsorted(np.sort(x), at, side="right") / len(x) for x in (a, b))
    return float(np.abs(np.subtract(*shares)).max())


@pytest.mark.parametrize(
    ("height", "width", "scale", "ratio"), [(333, 500, (0.08, 1.0), (3 / 4, 4 / 3)), (500, 200, (0.5, 0.9), (0.5, 1.0))]
)
def test_parts_are_distributed_as_torchvision_says(height: int, width: int, scale: Any, ratio: Any) -> None:
    count = 2000
    ours = figures(drawn(RandomResizedCrop(224, scale, ratio), count, height, width), height, width)
    theirs = figures(list(model(count, height, width, scale, ratio)), height, width)
    for name, values in ours.items():
        assert gap(values, theirs[name]) < 1.95 * math.sqrt(2 / count), name  # equal ones exceed it once in 1,000


def test_where_nothing_fits_it_is_the_middle_and_mirrored_as_often_as_asked() -> None:
    for height, width, expected in ((10, 1000, Crop(0, 493, 10, 13)), (1000, 10, Crop(493, 0, 13, 10))):
        assert set(drawn(RandomResizedCrop(8, scale=(0.9, 1.0)), 20, height, width)) == {expected}
    for flip in (0.0, 0.3):
        step = RandomResizedCrop(8, flip=flip)
        assert sum(step.draw(50, 50)[1] for _ in range(3000)) == pytest.approx(3000 * flip, abs=100 * (flip > 0))


SIZES = {(224, 224): Crop(0, 0, 120, 170), (64, 96): Crop(7, 31, 50, 41), (1, 1): Crop(100, 0, 1, 170)}


@pytest.mark.parametrize(("size", "crop"), [*SIZES.items(), ((300, 5), Crop(3, 9, 1, 1))])
def test_resizing_is_that_of_torch(size: tuple[int, int], crop: Crop, engine: None) -> None:
    top, left, height, width = crop
    part = photograph()[top : top + height, left : left + width]
    view = torch.from_numpy(part).permute(2, 0, 1)[None]
    expected = interpolate(view, size, mode="bilinear", antialias=True)[0].numpy()
    assert distance(crops.resized(part, size, "CHW"), expected).max() <= 1
    assert distance(crops.resized(part, size), expected.transpose(1, 2, 0)).max() <= 1
    mirrored = crops.resized(part, size, "HWC", mirror=True)
    assert distance(mirrored[:, ::-1], expected.transpose(1, 2, 0)).max() <= 1
    assert mirrored.flags.c_contiguous
    assert mirrored.flags.writeable


def test_resizing_anything_that_numpy_shows(engine: None) -> None:
    pixels = photograph()
    frozen = pixels.copy()
    frozen.flags.writeable = False
    views = [pixels[::-1], pixels[:, ::-1], pixels[..., ::-1], pixels[::3, 5:90:2], np.asfortranarray(pixels), frozen]
    for view in views:
        assert distance(crops.resized(view, (40, 50)), crops.resized(view.copy(), (40, 50))).max() == 0
    for grey in (0, 1, 200, 255):
        even = np.full((77, 310, 3), grey, np.uint8)
        for size in ((224, 224), (1, 5), (3, 1)):
            assert (crops.resized(even, size) == grey).all()
    assert (crops.resized(pixels, pixels.shape[:2]) == pixels).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_halves_do_the_same(kind: str, engine: None) -> None:
    data, layout = KINDS[kind], LAYOUTS[kind]
    step = sf.DecodeRandomResizedCrop((72, 90), (0.01, 1.0), flip=0.5, layout=layout)
    decode, rest = step.halves()
    for seed in range(8):
        fused, state = seeded(seed, step, data), random.getstate()
        assert distance(fused, seeded(seed, lambda: rest(decode(data)))).max() <= 1
        assert random.getstate() == state  # whatever comes next draws the same
        assert fused.shape == ((3, 72, 90) if layout == "CHW" else (72, 90, 3))


@needs_library
@pytest.mark.parametrize("kind", IN_PART)
def test_only_the_part_is_decoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crops, "DecodeImage", lambda: pytest.fail("decoded whole"))
    for _ in range(5):
        sf.DecodeRandomResizedCrop(33)(KINDS[kind])


@needs_library
@pytest.mark.parametrize(("side", "reduced"), [(161, False), (41, False), (40, True), (20, True), (10, True)])
def test_less_resolution_where_twice_the_size_is_left(side: int, reduced: bool) -> None:
    data = encode(photograph(300, 400), quality=95)
    whole: Any = sf.DecodeImage()(data)
    found = crops.decode_crop(data, Crop(11, 23, 161, 190), (side, side), "HWC", False)
    apart = distance(found, crops.resized(whole[11:172, 23:213], (side, side)))
    assert 0 < apart.mean() < 2.5 if reduced else apart.max() <= 1


@pytest.mark.parametrize("cut", [0, 3, 40, 300, 0.3, 0.9, -2])
def test_a_file_cut_short_is_an_error_wherever_the_part_lies(cut: float, engine: None) -> None:
    data = JPEG[: int(cut * len(JPEG)) if isinstance(cut, float) else cut]
    for seed in range(20):
        with pytest.raises(sf.InputError, match=f"no whole picture in these {len(data)} bytes"):
            seeded(seed, sf.DecodeRandomResizedCrop(8, scale=(0.01, 0.02)), data)


def test_damage_is_treated_as_by_the_decoder_of_whole_pictures(engine: None) -> None:
    step = sf.DecodeRandomResizedCrop(32, scale=(1.0, 1.0), ratio=(170 / 120, 170 / 120))
    refused = 0
    for seed in range(30):
        rng = random.Random(seed)
        data = bytearray(JPEG)
        data[rng.randrange(len(data) // 10, len(data) - 2)] = rng.randrange(256)
        try:
            whole: Any = sf.DecodeImage()(bytes(data))
        except sf.InputError as error:
            refused += 1
            with pytest.raises(sf.InputError, match=str(error)[:40]):
                step(bytes(data))
        else:
            assert distance(step(bytes(data)), crops.resized(whole, (32, 32))).max() <= 1
    assert refused < 15


def test_called_with_something_else() -> None:
    for step in (sf.DecodeRandomResizedCrop(8), sf.vision.DecodeResizeCenterCrop(8)):
        with pytest.raises(sf.InputError, match=r"needs the bytes of an encoded image.*RandomResizedCrop"):
            step(photograph())  # type: ignore[arg-type]
    for value in (JPEG, photograph().astype(np.float32), photograph()[..., 0], np.zeros((0, 5, 3), np.uint8)):
        with pytest.raises(sf.InputError, match=r"got a .*shape .*needs an image as uint8.*DecodeImage"):
            RandomResizedCrop(8)(value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_central_crop_is_that_of_the_resized_image(kind: str, engine: None) -> None:
    data, layout = KINDS[kind], LAYOUTS[kind]
    step = sf.vision.DecodeResizeCenterCrop((48, 40), 60, layout=layout)
    assert mark_of(step) is False
    pixels: Any = sf.DecodeImage()(data)
    (top, left, height, width), mirror = step.draw(*pixels.shape[:2])
    assert not mirror
    shorter = min(pixels.shape[:2])
    assert abs(height - 48 / 60 * shorter) <= 0.5 or height == 1
    assert abs(2 * top + height - pixels.shape[0]) <= 1
    assert abs(2 * left + width - pixels.shape[1]) <= 1
    expected = crops.resized(pixels[top : top + height, left : left + width], (48, 40), layout)
    assert distance(step(data), expected).max() <= 1


def test_a_folder_of_pictures_leaves_its_decoding_out(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats/1.jpg").write_bytes(JPEG)
    data = sf.ImageFolder(tmp_path, sf.DecodeRandomResizedCrop(16, layout="CHW"))
    assert len(data.pipeline) == 1
    assert data[0][0].shape == (3, 16, 16)
    with pytest.raises(sf.InputError, match="which decodes: leave them out"):
        sf.ImageFolder(tmp_path, sf.DecodeRandomResizedCrop(16), output="pil")
    assert len(sf.ImageFolder(tmp_path, RandomResizedCrop(16)).pipeline) == 2


def test_both_forms_of_the_cache_draw_the_same(tmp_path: Path, engine: None) -> None:
    for number in range(4):
        (tmp_path / f"{number}.jpg").write_bytes(encode(photograph(seed=number)))
    paths = [tmp_path / f"{number}.jpg" for number in range(4)]
    data = sf.FileDataset(paths, [0, 1, 2, 3], sf.DecodeRandomResizedCrop(40, flip=0.5))
    epochs: dict[str, list[Any]] = {}
    for form in ("fetched", "prepared"):
        with sf.CachedDataset(data, capacity="8MiB", form=form) as cached:
            epochs[form] = [cached[id][0] for _ in range(3) for id in range(4)]
            whole = cached.cache.get_many([0])[0][0]
            assert isinstance(whole, bytes) if form == "fetched" else whole.shape == (120, 170, 3)
    assert all(distance(*both).max() <= 2 for both in zip(epochs["fetched"], epochs["prepared"], strict=True))
    assert all(distance(epochs["fetched"][id], epochs["fetched"][id + 4]).max() > 2 for id in range(4))


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
    with pytest.raises(sf.InputError, match="got a list without a uint8 tensor of 4 dimensions"):
        Normalize()([torch.zeros(2, 4, 5, 3)])
    with pytest.raises(sf.InputError, match="not 3 channels in this layout"):
        Normalize(layout="CHW")(torch.zeros(2, 4, 5, 3, dtype=torch.uint8))


def double(value: int) -> int:
    return 2 * value


@sf.mark_random
def add_some(value: int) -> int:
    return value + random.randint(1, 1000)


@sf.mark_random
class DoubleAndAdd:
    def __call__(self, value: int) -> int:
        return add_some(2 * value)

    def halves(self) -> tuple[Any, Any]:
        return double, add_some


def test_the_first_half_ends_the_part_that_may_be_cached() -> None:
    positive = sf.mark_deterministic(partial(abs))
    whole = sf.Compose([positive, DoubleAndAdd(), add_some, DoubleAndAdd()])
    parts = sf.split(whole)
    assert list(parts.deterministic) == [positive, double]
    assert list(parts.random)[:2] == [add_some, add_some]
    assert isinstance(parts.random.transforms[2], DoubleAndAdd)  # what comes later stays whole
    assert [verdict.reason for verdict in parts.verdicts][1:3] == ["halves", "halves"]
    for value in range(-5, 5):
        expected = seeded(value, whole, value)
        assert seeded(value, lambda value: parts.random(parts.deterministic(value)), value) == expected


def test_halves_do_not_stand_for_a_subclass_that_does_more_or_a_step_that_counts_as_deterministic() -> None:
    class AddTwice(DoubleAndAdd):
        def __call__(self, value: int) -> int:
            return add_some(super().__call__(value))

    assert len(sf.split(AddTwice()).deterministic) == 0
    step = sf.mark_deterministic(DoubleAndAdd())
    assert list(sf.split(step).deterministic) == [step]
