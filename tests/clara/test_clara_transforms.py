"""What Clara's transforms do, one by one."""

from __future__ import annotations

import copy
import gzip
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from clara_data import volume, write

import stallfree as sf
from stallfree.clara.fields import spacing_of
from stallfree.clara.registry import TRANSFORMS
from stallfree.pipeline.classify import known, split
from stallfree.pipeline.fingerprint import fingerprint

Sample = dict[str, Any]


def made(name: str, fields: Any = "image", **args: Any) -> Callable[[Sample], Sample]:
    return TRANSFORMS[name](fields, **args)


def sample(shape: tuple[int, ...] = (2, 6, 7, 8), spacing: tuple[float, ...] = (1, 1, 1)) -> Sample:
    """An image of counted voxels, and a label that is twice that."""
    image = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    near = np.array(spacing, np.float32)
    return {"image": image, "label": 2 * image, spacing_of("image"): near, spacing_of("label"): near.copy()}


ALL: list[tuple[str, dict[str, Any]]] = [
    ("ConvertToChannelsFirst", {}),
    ("ScaleIntensityRange", {"a_min": 0, "a_max": 100, "b_min": 0, "b_max": 1, "clip": True}),
    ("NormalizeNonzeroIntensities", {}),
    ("CenterData", {}),
    ("ScaleByResolution", {"target_resolution": [2, 1, 1]}),
    ("ScaleToShape", {"target_shape": [3, 3, 9]}),
    ("SymmetricPadder", {"size": [9, 9, 9]}),
    ("CropFixedSizeCenter", {"size": [2, 3, 4]}),
    ("CropFixedSizeRandomCenter", {"size": [2, 3, 4]}),
    ("RandomAxisFlip", {"probability": 1.0}),
    ("AddGaussianNoise", {"probability": 1.0}),
]
RANDOM = {"CropFixedSizeRandomCenter", "RandomAxisFlip", "AddGaussianNoise"}


@pytest.mark.parametrize(("name", "args"), ALL, ids=[name for name, _ in ALL])
def test_what_holds_for_all(name: str, args: dict[str, Any]) -> None:
    step = made(name, ["image", "label"], **args)
    before = sample((6, 7, 8) if name == "ConvertToChannelsFirst" else (2, 6, 7, 8))
    given = copy.deepcopy(before)
    after = step(given)
    assert known(step) == (name in RANDOM, "mark")
    assert split(step).verdicts[0].random == (name in RANDOM)
    for key, value in before.items():  # what was given is as it was
        np.testing.assert_array_equal(given[key], value)
    assert after.keys() == before.keys()
    assert after is not given
    assert after["image"].shape == after["label"].shape
    assert {after["image"].dtype, after["label"].dtype} == {np.dtype(np.float32)}
    assert any(after[field].shape != before[field].shape or (after[field] != before[field]).any() for field in before)
    again = pickle.loads(pickle.dumps(step))
    assert fingerprint(again) == fingerprint(step) != fingerprint(made(name, "image", **args))
    assert repr(step) == f"{name}(image, label)"
    tensors = {key: torch.from_numpy(value) for key, value in before.items()}
    np.random.seed(3)
    torch.manual_seed(3)
    expected = step(before)["image"]
    np.random.seed(3)
    torch.manual_seed(3)
    from_tensors = step({**before, "image": tensors["image"], "label": tensors["label"]})
    np.testing.assert_array_equal(from_tensors["image"], expected)


@pytest.mark.parametrize(("name", "args"), ALL, ids=[name for name, _ in ALL])
def test_fields_that_are_not_there_or_no_volumes(name: str, args: dict[str, Any]) -> None:
    with pytest.raises(sf.InputError, match=r"no field 'mask': give one of 'image', 'label'"):
        made(name, "mask", **args)(sample())
    with pytest.raises(sf.InputError, match=r"field 'image' holds a bytes and no volume"):
        made(name, **args)({"image": b""})


def test_all_are_tested() -> None:
    assert {name for name, _ in ALL} | {"LoadNifti"} == TRANSFORMS.keys()


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "two", "shape"),
    [("a.nii", False, (4, 5, 6)), ("a.nii.gz", True, (4, 5, 6, 2)), ("a.nii", True, (4, 5))],
)
def test_loading(name: str, two: bool, shape: tuple[int, ...], tmp_path: Path) -> None:
    spacing = (0.5, 2.0, 3.0)[: len(shape)]
    data = write(tmp_path / name, volume(3, shape), spacing, two)
    assert data.startswith(b"\x1f\x8b") == name.endswith("gz")
    loaded = made("LoadNifti")({"image": data})
    np.testing.assert_array_equal(loaded["image"], volume(3, shape))
    assert loaded["image"].dtype == np.float32
    assert loaded["image"].flags.c_contiguous
    assert loaded["image"].flags.writeable
    assert loaded[spacing_of("image")].tolist() == list(spacing)
    first = made("ConvertToChannelsFirst")(loaded)["image"]
    assert first.shape == ((2, 4, 5, 6) if len(shape) == 4 else (1, *shape))
    np.testing.assert_array_equal(first[0], volume(3, shape)[..., 0] if len(shape) == 4 else volume(3, shape))


def test_loading_scales_and_casts(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(np.arange(24, dtype=np.int16).reshape(2, 3, 4), np.eye(4))
    image.header.set_slope_inter(0.5, 10)
    nibabel.save(image, tmp_path / "a.nii")
    data = (tmp_path / "a.nii").read_bytes()
    wanted = np.asarray(nibabel.load(tmp_path / "a.nii").dataobj)
    np.testing.assert_allclose(made("LoadNifti")({"image": data})["image"], wanted)
    assert made("LoadNifti", dtype="int16")({"image": data})["image"].dtype == np.int16


def test_loading_in_canonical_order(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    nibabel.save(nibabel.Nifti1Image(array, np.diag([-2.0, 1, 3, 1])), tmp_path / "a.nii")
    record = {"image": (tmp_path / "a.nii").read_bytes()}
    for asked in (True, "true"):
        found = made("LoadNifti", as_closest_canonical=asked)(record)
        np.testing.assert_array_equal(found["image"], array[::-1])
        assert found[spacing_of("image")].tolist() == [2, 1, 3]
    np.testing.assert_array_equal(made("LoadNifti", as_closest_canonical="false")(record)["image"], array)


@pytest.mark.parametrize("damage", [b"", b"\x1f\x8b", b"text" * 200, "cut", "cut gzip", "trailing"])
def test_loading_damaged_files(damage: bytes | str, tmp_path: Path) -> None:
    whole = write(tmp_path / "a.nii", volume(1))
    data = {"cut": whole[:-1], "cut gzip": gzip.compress(whole)[:-9], "trailing": gzip.compress(whole) + b"x"}
    given = damage if isinstance(damage, bytes) else data[damage]
    with pytest.raises(sf.InputError, match=rf"the {len(given)} bytes of field 'image' are no whole NIfTI volume"):
        made("LoadNifti")({"image": given})


def test_channels_of_what_others_loaded() -> None:
    for shape, expected in (((4, 5), (1, 4, 5)), ((4, 5, 6), (1, 4, 5, 6)), ((4, 5, 6, 2), (2, 4, 5, 6))):
        assert made("ConvertToChannelsFirst")({"image": np.zeros(shape)})["image"].shape == expected
    with pytest.raises(sf.InputError, match=r"shape \(4,\)"):
        made("ConvertToChannelsFirst")({"image": np.zeros(4)})


@pytest.mark.parametrize(
    "name", ["NormalizeNonzeroIntensities", "RandomAxisFlip", "SymmetricPadder", "ScaleByResolution", "ScaleToShape"]
)
def test_channels_are_asked_for(name: str) -> None:
    args = dict(ALL)[name]
    with pytest.raises(sf.InputError, match=r"shape \(6, 7, 8\), expected channels and 3 axes: put ConvertToChannels"):
        made(name, **args)(sample((6, 7, 8)))


# -- intensities -------------------------------------------------------------------------------------------------------


def test_scaling_of_intensities() -> None:
    values = {"image": np.array([[-100, 0, 50, 100, 200]], np.int16)}
    args = {"a_min": 0, "a_max": 100, "b_min": 1, "b_max": -1}
    assert made("ScaleIntensityRange", **args)(values)["image"].tolist() == [[3, 1, 0, -1, -3]]
    assert made("ScaleIntensityRange", **args, clip=True)(values)["image"].tolist() == [[1, 1, 0, -1, -1]]


def test_normalizing() -> None:
    image = np.array([[[0, 0], [2, 4]], [[5, 5], [5, 5]], [[0, 0], [0, 0]]], np.float32)
    found = made("NormalizeNonzeroIntensities")({"image": image})["image"]
    assert found.tolist() == [[[0, 0], [-1, 1]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]]
    image = np.array([1, 3], np.float32)
    assert made("CenterData")({"image": image})["image"].tolist() == [-1, 1]
    assert made("CenterData", subtrahend=1, divisor=4)({"image": image})["image"].tolist() == [0, 0.5]
    assert made("CenterData")({"image": np.ones(3)})["image"].tolist() == [0, 0, 0]


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_resampling_to_a_resolution() -> None:
    ramp = np.broadcast_to(np.arange(16, dtype=np.float32)[:, None, None], (1, 16, 4, 4))
    given = {"image": ramp, spacing_of("image"): np.array([0.5, 1, 2], np.float32)}
    found = made("ScaleByResolution", target_resolution=[1.0, 1.0, 1.0])(given)
    assert found["image"].shape == (1, 8, 4, 8)
    assert found[spacing_of("image")].tolist() == [1, 1, 1]
    np.testing.assert_allclose(found["image"][0, :, 0, 0], np.arange(8) * 2 + 0.5, atol=1e-5)
    tiny = made("ScaleByResolution", target_resolution=[100, 100, 100])(given)["image"]
    assert tiny.shape == (1, 1, 1, 1)


def test_resampling_of_labels_makes_no_new_labels() -> None:
    labels = np.random.default_rng(0).choice([0, 3, 7], (1, 5, 6, 7)).astype(np.uint8)
    given = {"label": labels, spacing_of("label"): np.array([1, 1, 1], np.float32)}
    for step in (
        made("ScaleByResolution", "label", target_resolution=[0.7, 1.3, 1], is_label=True),
        made("ScaleToShape", "label", target_shape=[9, 4, 7], is_label=True),
    ):
        found = step(given)["label"]
        assert found.dtype == np.uint8
        assert set(np.unique(found)) <= {0, 3, 7}
    assert made("ScaleToShape", "label", target_shape=[9, 4, 7])(given)["label"].dtype == np.float32


def test_resampling_to_a_shape() -> None:
    found = made("ScaleToShape", target_shape=[3, 14, 8])(sample((2, 6, 7, 8), (1, 1, 1)))
    assert found["image"].shape == (2, 3, 14, 8)
    assert found[spacing_of("image")].tolist() == [2, 0.5, 1]
    flat = made("ScaleToShape", target_shape=[4, 4])({"image": np.ones((1, 2, 2), np.float32)})["image"]
    assert flat.tolist() == np.ones((1, 4, 4)).tolist()


def test_resampling_needs_to_know_the_resolution() -> None:
    with pytest.raises(sf.InputError, match=r"no field 'image\.spacing'"):
        made("ScaleByResolution", target_resolution=[1, 1, 1])({"image": np.zeros((1, 2, 2, 2))})


def test_padding() -> None:
    found = made("SymmetricPadder", size=[4, 3, 2])({"image": np.ones((1, 2, 2, 5), np.uint8)})["image"]
    assert found.shape == (1, 4, 3, 5)
    assert found.dtype == np.uint8
    assert found[0, :, :, 0].tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 0]]


def test_cropping() -> None:
    given = sample()
    found = made("CropFixedSizeCenter", size=[2, 3, 4])(given)["image"]
    np.testing.assert_array_equal(found, given["image"][:, 2:4, 2:5, 2:6])
    for name in ("CropFixedSizeCenter", "CropFixedSizeRandomCenter"):
        with pytest.raises(sf.InputError, match=r"has \[6, 7, 8\] voxels, fewer than the crop of \[6, 8, 8\]"):
            made(name, size=[6, 8, 8])(given)
    with pytest.raises(sf.InputError, match=r"expected channels and 2 axes"):
        made("CropFixedSizeCenter", size=[2, 3])(given)


# -- augmentation ------------------------------------------------------------------------------------------------------


def test_random_crops_are_everywhere_and_the_same_in_all_fields() -> None:
    given = sample((1, 3, 4, 2))
    step = made("CropFixedSizeRandomCenter", ["image", "label"], size=[2, 2, 2])
    corners = set()
    for seed in range(100):
        np.random.seed(seed)
        found = step(given)
        np.testing.assert_array_equal(found["label"], 2 * found["image"])
        assert found["image"].shape == (1, 2, 2, 2)
        corners.add(float(found["image"].flat[0]))
    assert corners == set(given["image"][0, :2, :3, 0].ravel().tolist())
    with pytest.raises(sf.InputError, match=r"the fields differ in size \('image' \[3, 4, 2\], 'label' \[2, 4, 2\]\)"):
        step({**given, "label": given["label"][:, 1:]})


def test_random_crops_near_the_centre() -> None:
    given = sample((1, 9, 9, 9))
    step = made("CropFixedSizeRandomCenter", size=[3, 3, 3], max_displacement=1)
    np.random.seed(0)
    found = {float(step(given)["image"].flat[0]) for _ in range(300)}
    assert found <= set(given["image"][0, 2:5, 2:5, 2:5].ravel().tolist())
    assert len(found) > 20
    fixed = made("CropFixedSizeRandomCenter", size=[3, 3, 3], max_displacement=0)
    np.testing.assert_array_equal(fixed(given)["image"], given["image"][:, 3:6, 3:6, 3:6])


def test_flips() -> None:
    given = sample((1, 3, 4, 5))
    step = made("RandomAxisFlip", ["image", "label"], probability=0.75)
    flipped = [np.flip(given["image"], axis).tobytes() for axis in (1, 2, 3)]
    counts = dict.fromkeys([given["image"].tobytes(), *flipped], 0)
    for seed in range(400):
        np.random.seed(seed)
        found = step(given)
        np.testing.assert_array_equal(found["label"], 2 * found["image"])
        counts[found["image"].tobytes()] += 1
    assert all(60 < count < 140 for count in counts.values())
    never = made("RandomAxisFlip", probability=0)
    assert all(never(given)["image"] is given["image"] for _ in range(20))


def test_noise() -> None:
    given = {"image": np.full((1, 40, 40, 40), 5, np.float32), "label": np.zeros((1, 40, 40, 40), np.float32)}
    torch.manual_seed(0)
    found = made("AddGaussianNoise", ["image", "label"], probability=1, variance=0.25)(given)
    assert found["image"].mean() == pytest.approx(5, abs=0.02)
    assert found["image"].var() == pytest.approx(0.25, abs=0.01)
    assert abs(np.corrcoef(found["image"].ravel(), found["label"].ravel())[0, 1]) < 0.02
    np.random.seed(0)
    noisy = sum(made("AddGaussianNoise", probability=0.25)(given)["image"] is not given["image"] for _ in range(200))
    assert 25 < noisy < 80
