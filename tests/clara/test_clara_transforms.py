"""Clara's transforms, by what they do to a volume, and configurations as NVIDIA published them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clara_data import BOTH, LOAD, make_data, section, write, write_config

from stallfree.clara import load
from stallfree.clara.configuration import make_transforms

SIZE = (6, 5, 4)


@pytest.fixture
def image() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 9, (1, *SIZE)).astype(np.float32))


def apply(name: str, image: Any, **args: Any) -> Any:
    (transform,) = make_transforms([{"name": name, "args": {"fields": "image", **args}}], "pre_transforms")
    return transform({"image": image})["image"]


def test_loads_volumes_as_they_are_stored(tmp_path: Path) -> None:
    array = np.arange(120, dtype=np.int16).reshape(SIZE)
    for name, two in (("a.nii", False), ("b.nii.gz", True)):
        write(tmp_path / name, array, two=two)
        assert np.array_equal(apply("LoadNifti", str(tmp_path / name)), array)
    assert apply("LoadNifti", str(tmp_path / "a.nii"), dtype="float64").dtype == torch.float64
    for shape, channels in ((SIZE, 1), ((*SIZE, 2), 2)):
        write(tmp_path / "c.nii", np.zeros(shape, np.float32))
        assert apply("ConvertToChannelsFirst", apply("LoadNifti", str(tmp_path / "c.nii"))).shape == (channels, *SIZE)


def test_intensities(image: torch.Tensor) -> None:
    scaled = apply("ScaleIntensityRange", image, a_min=2, a_max=6, b_min=0, b_max=1, clip=True)
    assert torch.allclose(scaled, ((image - 2) / 4).clip(0, 1))
    inside = image != 0
    normal = apply("NormalizeNonzeroIntensities", image)
    assert torch.equal(normal == 0, ~inside)
    assert abs(normal[inside].mean()) < 1e-5
    assert abs(normal[inside].std(correction=0) - 1) < 1e-4
    assert torch.allclose(apply("CenterData", image, subtrahend=3, divisor=2), (image - 3) / 2)
    assert abs(apply("CenterData", image).mean()) < 1e-5


def test_sizes(image: torch.Tensor, tmp_path: Path) -> None:
    assert apply("ScaleToShape", image, target_shape=[3, 10, 4]).shape == (1, 3, 10, 4)
    labels = apply("ScaleToShape", image, target_shape=[12, 10, 8], is_label=True)
    assert set(labels.unique().tolist()) <= set(image.unique().tolist())
    padded = apply("SymmetricPadder", image, size=[8, 4, 6])
    assert torch.equal(padded[:, 1:7, :, 1:5], image)
    assert padded.sum() == image.sum()
    assert torch.equal(apply("CropFixedSizeCenter", image, size=[4, 3, 2]), image[:, 1:5, 1:4, 1:3])
    write(tmp_path / "a.nii", np.ones(SIZE, np.float32), spacing=(2, 1, 0.5))
    loaded = apply("ConvertToChannelsFirst", apply("LoadNifti", str(tmp_path / "a.nii")))
    assert apply("ScaleByResolution", loaded, target_resolution=[1, 1, 1]).shape == (1, 11, 5, 2)


def test_random_transforms(image: torch.Tensor) -> None:
    crop = apply("CropFixedSizeRandomCenter", image, size=[2, 2, 2])
    assert crop.shape == (1, 2, 2, 2)
    flipped = apply("RandomAxisFlip", image, probability=1.0)
    assert any(torch.equal(flipped, image.flip(axis)) for axis in (1, 2, 3))
    assert torch.equal(apply("RandomAxisFlip", image, probability=0.0), image)
    noise = apply("AddGaussianNoise", torch.zeros(1, 30, 30, 30), probability=1.0, variance=4.0)
    assert abs(noise.std() - 2) < 0.1


def test_configurations_of_the_published_kind(tmp_path: Path) -> None:
    make_data(tmp_path)
    scale = {"fields": "image", "a_min": -57, "a_max": 164, "b_min": 0, "b_max": 1, "clip": True}
    steps = [
        *LOAD,
        {"name": "ScaleIntensityRange", "args": scale},
        {"name": "CropFixedSizeRandomCenter", "args": {"fields": BOTH, "size": [3, 3, 3]}},
        {"name": "RandomAxisFlip", "args": {"fields": BOTH, "probability": 0.5}},
    ]
    kind, args = "SegmentationImagePipelineWithCache", {"output_crop_size": [3, 3, 3], "num_cache_objects": 4}
    parts = {
        "train": section(kind, steps, replace_percent=0, **args),
        "validate": section(kind, steps, replace_percent=0.1, **args),
    }
    path = write_config(tmp_path, DATA_ROOT=str(tmp_path), DATASET_JSON=str(tmp_path / "list.json"), **parts)
    with load(path, seed=0) as pipelines:
        for pipeline in (pipelines.train, pipelines.validate):
            assert pipeline is not None
            for _ in range(3):
                for batch in pipeline:
                    assert batch["image"].shape == batch["label"].shape == (2, 1, 3, 3, 3)
                    del batch
