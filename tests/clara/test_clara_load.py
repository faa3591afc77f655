"""Clara's pipelines, from the configuration to the batches."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from clara_data import BOTH, LOAD, LOAD_IMAGE, NOISE, SHAPE, make_data, section, volume, write, write_config

import stallfree as sf
from stallfree.clara import load

KINDS = [f"{task}ImagePipeline{cache}" for task in ("Segmentation", "Classification") for cache in ("", "WithCache")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a data set of ten samples."""
    root = tmp_path_factory.mktemp("clara")
    make_data(root)
    return root


def open_(tmp_path: Path, root: Path, *, list_: str = "list.json", seed: int = 0, **parts: Any) -> Any:
    return load(write_config(tmp_path, **parts), seed=seed, DATASET_JSON=root / list_, DATA_ROOT=str(root))


def settle(pipelines: Any) -> None:
    """Late replacements must not make a test depend on time."""
    pipelines.train.dataset.window.on_late = "wait"


def numbers(batches: Iterable[Any]) -> list[int]:
    """The samples of an epoch, by their labels; each must come with its own image."""
    found: list[int] = []
    for batch in batches:
        assert batch.keys() == {"image", "label"}
        assert type(batch["image"]) is type(batch["label"]) is torch.Tensor
        labels = batch["label"].reshape(len(batch["label"]), -1)[:, 0].tolist()
        means = batch["image"].mean(dim=(1, 2, 3, 4))
        assert torch.allclose(means, torch.tensor(labels, dtype=torch.float32) + 0.125, atol=0.2)
        found += map(int, labels)
    return found


# -- the four pipelines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "workers"), list(zip(KINDS, (0, 1, 1, 0), strict=True)))
def test_every_pipeline_trains_and_validates(kind: str, workers: int, data: Path, tmp_path: Path) -> None:
    volumes, cached = kind.startswith("Seg"), kind.endswith("WithCache")
    transforms = [*(LOAD if volumes else LOAD_IMAGE), NOISE]
    cache = {"num_cache_objects": 1, "replace_percent": None} if cached else {}
    parts = {
        "train": section(kind, transforms, num_workers=workers),
        "validate": section(kind, transforms[:-1], num_workers=workers, data_list_key="validation", **cache),
    }
    with open_(tmp_path, data, list_="list.json" if volumes else "numbers.json", **parts) as pipelines:
        train, validate = pipelines.train, pipelines.validate
        assert (train.name, len(train), len(validate)) == (kind, 2 if cached else 4, 1)
        assert isinstance(train.loader, sf.DataLoader)
        assert train.loader.num_workers == workers
        assert isinstance(train.dataset, sf.SmartCacheDataset) is cached
        if cached:
            assert (train.dataset.cache_num, train.dataset.replace_num) == (4, 1)
            assert (validate.dataset.cache_num, validate.dataset.replace_num) == (1, 0)
        orders = []
        for _ in range(3):
            orders.append(numbers(train))
            assert len(set(orders[-1])) == (4 if cached else 8)
            assert set(orders[-1]) <= set(range(8))
            assert numbers(validate) == ([8] if cached else [8, 9])
        assert len(set(map(tuple, orders))) > 1
        batch = next(iter(train))
        found = [(batch[field].shape, batch[field].dtype) for field in BOTH]
        volume_of = ((2, 1, *SHAPE), torch.float32)
        assert found == [volume_of, volume_of if volumes else ((2,), torch.int64)]
        del batch


def test_one_section_with_arguments_that_clara_has_too(data: Path, tmp_path: Path) -> None:
    same = {"output_data_format": "channels_first", "output_data_dims": 3, "output_image_channels": 1, "repeat": True}
    same |= {"duplicate_count": 1, "batched_by_transforms": False, "output_label_format": [1, 1], "num_workers": 2}
    part = section("SegmentationImagePipeline", LOAD, output_crop_size=[-1, 5, -1], prefetch_size=5, **same)
    with open_(tmp_path, data, validate=part) as pipelines:
        assert pipelines.train is None
        assert pipelines.validate.loader.prefetch_factor == 3
        assert numbers(pipelines.validate) == list(range(8))
        pipelines.close()  # twice does no harm


def test_urls_and_absolute_paths_with_a_transform_of_the_users_own(tmp_path: Path, data: Path) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    memory = MemoryFileSystem()
    names = [f"/clara/images/{n}.nii.gz" for n in range(2)]
    try:
        for name in names:
            memory.pipe(name, (data / name.removeprefix("/clara/")).read_bytes())
        entries = [
            {"image": "./images/0.nii.gz", "label": [0, 0.5]},
            {"image": "memory://clara/images/1.nii.gz", "label": [1, 0.5]},
            {"image": str(data / "images/2.nii.gz"), "label": [2, 0.5]},
        ]
        memory.pipe("/clara/list.json", json.dumps({"training": entries}).encode())
        own = {"path": "clara_data.Own", "args": {"fields": "image"}}
        part = section("ClassificationImagePipeline", [own, NOISE], shuffle=False)
        config = write_config(tmp_path, train=part)
        with load(config, DATASET_JSON="memory://clara/list.json", DATA_ROOT="memory://clara") as pipelines:
            assert numbers(pipelines.train) == [0, 1, 2]
            assert next(iter(pipelines.train))["label"].tolist() == [[0.0, 0.5], [1.0, 0.5]]
    finally:
        memory.rm("/clara", recursive=True)


# -- cache and augmentation --------------------------------------------------------------------------------------------


def test_the_window_moves_and_augmentation_is_fresh(data: Path, tmp_path: Path) -> None:
    crop = {"name": "CropFixedSizeRandomCenter", "args": {"fields": BOTH, "size": [3, 3, 3]}}
    flip = {"name": "RandomAxisFlip", "args": {"fields": BOTH}}
    size = {"output_crop_size": [3, 3, 3], "replace_percent": None}
    part = section("SegmentationImagePipelineWithCache", [*LOAD, crop, flip, NOISE], **size)
    with open_(tmp_path, data, train=part) as pipelines:
        settle(pipelines)
        train = pipelines.train
        assert train.dataset.replace_num == 1, "a tenth of four, by default"
        seen: dict[int, list[bytes]] = {}
        for epoch in range(8):
            found = []
            for batch in train:
                labels = batch["label"][:, 0, 0, 0, 0].int().tolist()
                found += labels
                for label, image in zip(labels, batch["image"], strict=True):
                    seen.setdefault(label, []).append(image.numpy().tobytes())
                del batch, image
            assert set(found) == set(train.dataset.window.plan.window(epoch).tolist())
        assert all(len(images) == len(set(images)) == 4 for images in seen.values())
        assert len(seen) == 8


def test_what_is_cached_is_the_deterministic_prefix(data: Path, tmp_path: Path) -> None:
    """Transforms of Clara, and of MONAI under their own names."""
    pad = {"name": "SpatialPadd", "args": {"keys": BOTH, "spatial_size": [6, 6, 6], "mode": "edge"}}
    crop = {"name": "CropFixedSizeCenter", "args": {"fields": BOTH, "size": list(SHAPE)}}
    part = section("SegmentationImagePipelineWithCache", [*LOAD, pad, crop, NOISE, crop])
    with open_(tmp_path, data, train=part) as pipelines:
        settle(pipelines)
        dataset = pipelines.train.dataset
        names = [type(step).__name__ for step in sf.split(dataset.source.pipeline).deterministic]
        assert names == ["LoadImaged", "EnsureChannelFirstd", "SpatialPadd", "CenterSpatialCropd"]
        for _ in range(3):
            assert len(list(pipelines.train)) == 2
        assert dataset.stats().hits >= 6, "one sample is new in each epoch"


def test_augmentation_is_a_function_of_the_seed(data: Path, tmp_path: Path) -> None:
    seen = []
    for seed, workers in ((1, 0), (1, 1), (2, 0)):
        part = section("SegmentationImagePipeline", [*LOAD, NOISE], num_workers=workers)
        with open_(tmp_path, data, seed=seed, train=part) as pipelines:
            seen.append([batch["image"].clone() for batch in pipelines.train])
    assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(seen[0], seen[2], strict=True))


# -- placeholders ------------------------------------------------------------------------------------------------------


def test_placeholders(data: Path, tmp_path: Path) -> None:
    part = section(
        "SegmentationImagePipelineWithCache",
        [*LOAD, {"name": "{noise_name}", "args": {"fields": ["{field}"], "variance": "{variance}"}}],
        data_list_file_path="{DATA_ROOT}/{file}.json",
        num_cache_objects="{objects}",
        output_batch_size="{objects}",
    )
    variables = {"noise_name": "AddGaussianNoise", "objects": 5, "file": "{stem}", "stem": "list", "field": "image"}
    model = {"name": "SegAhnet", "args": {"weights": "{NOBODY_ASKS_FOR_THIS}"}}
    config = write_config(tmp_path, variance=2.25, **variables, train={**part, "model": model})
    with load(config, DATA_ROOT=data, objects=3, unused="taken, as an environment may hold more") as opened:
        pipelines: Any = opened
        dataset = pipelines.train.dataset
        assert (dataset.cache_num, pipelines.train.loader.batch_size) == (3, 3)
        assert sf.split(dataset.source.pipeline).random.transforms[0].rand_gaussian_noise.std == 1.5


# -- files that cannot be read -----------------------------------------------------------------------------------------


def test_a_bad_file_stops_training_with_its_path(tmp_path: Path) -> None:
    make_data(tmp_path)
    path = tmp_path / "labels/6.nii"
    path.write_bytes(path.read_bytes()[:-40])
    with open_(tmp_path, tmp_path, train=section("SegmentationImagePipelineWithCache", LOAD)) as pipelines:
        settle(pipelines)
        with pytest.raises(Exception) as caught:  # noqa: PT011 (MONAI's error depends on the file)
            numbers(itertools.chain.from_iterable(itertools.repeat(pipelines.train)))
        assert any(str(path) in note for note in caught.value.__notes__)


def test_a_sample_of_another_size_is_named(tmp_path: Path) -> None:
    make_data(tmp_path)
    write(tmp_path / "images/5.nii.gz", volume(5, (4, 5, 7)))
    message = r"(?s)\[1, 4, 5, 7\].*\[channels, 4, 5, 6\].*sample 5 .*5\.nii\.gz"
    part = section("SegmentationImagePipeline", LOAD)
    with open_(tmp_path, tmp_path, train=part) as pipelines, pytest.raises(sf.InputError, match=message):
        numbers(pipelines.train)
