"""Clara's pipelines: transforms, batches, and a configuration that cannot be used, one clear error before the start."""

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clara_data import BOTH, LOAD, LOAD_IMAGE, NOISE, SHAPE, make_data, section, volume, write, write_config

import stallfree as sf
from stallfree.clara import load
from stallfree.clara.configuration import make_transforms

pytestmark = pytest.mark.libraries
PLAIN, CACHED = "SegmentationImagePipeline", "SegmentationImagePipelineWithCache"
NUMBERS = "ClassificationImagePipeline"


@pytest.fixture(scope="module", autouse=True)
def monai() -> None:
    import monai.transforms  # noqa: F401 (before a test hides nibabel, whose absence it would remember)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clara")
    make_data(root)
    return root


def open_(tmp_path: Path, root: Path, *, list_: str = "list.json", seed: int = 0, **parts: Any) -> Any:
    """The pipelines of a configuration of these parts, whose late replacements make no test depend on time."""
    made = load(write_config(tmp_path, **parts), seed=seed, DATASET_JSON=root / list_, DATA_ROOT=str(root))
    if made.train is not None and isinstance(made.train.dataset, sf.SmartCacheDataset):
        made.train.dataset.window.on_late = "wait"
    return made


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


@pytest.mark.parametrize(("kind", "workers"), [(PLAIN, 0), (CACHED, 1), (NUMBERS, 1), (f"{NUMBERS}WithCache", 0)])
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
    part = section(PLAIN, LOAD, output_crop_size=[-1, 5, -1], prefetch_size=5, **same)
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
        config = write_config(tmp_path, train=section(NUMBERS, [own, NOISE], shuffle=False))
        with load(config, DATASET_JSON="memory://clara/list.json", DATA_ROOT="memory://clara") as pipelines:
            assert numbers(pipelines.train) == [0, 1, 2]
            assert next(iter(pipelines.train))["label"].tolist() == [[0.0, 0.5], [1.0, 0.5]]
    finally:
        memory.rm("/clara", recursive=True)


CROP = {"name": "CropFixedSizeRandomCenter", "args": {"fields": BOTH, "size": [3, 3, 3]}}
FLIP = {"name": "RandomAxisFlip", "args": {"fields": BOTH, "probability": 0.5}}


def test_the_window_moves_and_augmentation_is_fresh(data: Path, tmp_path: Path) -> None:
    part = section(CACHED, [*LOAD, CROP, FLIP, NOISE], output_crop_size=[3, 3, 3], replace_percent=None)
    with open_(tmp_path, data, train=part) as pipelines:
        train = pipelines.train
        seen: dict[int, list[bytes]] = {}
        for epoch in range(8):
            batches = (zip(batch["image"], batch["label"], strict=True) for batch in train)
            images = {int(label.max()): image.numpy().tobytes() for rows in batches for image, label in rows}
            assert images.keys() == set(train.dataset.window.plan.window(epoch).tolist())
            for id, image in images.items():
                seen.setdefault(id, []).append(image)
        assert all(len(images) == len(set(images)) == 4 for images in seen.values())
        assert len(seen) == 8


def test_what_is_cached_is_the_deterministic_prefix(data: Path, tmp_path: Path) -> None:
    """Transforms of Clara, and of MONAI under their own names."""
    pad = {"name": "SpatialPadd", "args": {"keys": BOTH, "spatial_size": [6, 6, 6], "mode": "edge"}}
    crop = {"name": "CropFixedSizeCenter", "args": {"fields": BOTH, "size": list(SHAPE)}}
    with open_(tmp_path, data, train=section(CACHED, [*LOAD, pad, crop, NOISE, crop])) as pipelines:
        dataset = pipelines.train.dataset
        names = [type(step).__name__ for step in sf.split(dataset.source.pipeline).deterministic]
        assert names == ["LoadImaged", "EnsureChannelFirstd", "SpatialPadd", "CenterSpatialCropd"]
        for _ in range(3):
            assert len(list(pipelines.train)) == 2
        assert dataset.stats().hits >= 6, "one sample is new in each epoch"


def test_augmentation_is_a_function_of_the_seed(data: Path, tmp_path: Path) -> None:
    seen = []
    for seed, workers in ((1, 0), (1, 1), (2, 0)):
        part = section(PLAIN, [*LOAD, NOISE], num_workers=workers)
        with open_(tmp_path, data, seed=seed, train=part) as pipelines:
            seen.append([batch["image"].clone() for batch in pipelines.train])
    assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(seen[0], seen[2], strict=True))


def test_placeholders(data: Path, tmp_path: Path) -> None:
    steps = [*LOAD, {"name": "{noise_name}", "args": {"fields": ["{field}"], "variance": "{variance}"}}]
    sizes = {"num_cache_objects": "{objects}", "output_batch_size": "{objects}", "replace_percent": None}
    part = section(CACHED, steps, data_list_file_path="{DATA_ROOT}/{file}.json", **sizes)
    variables = {"noise_name": "AddGaussianNoise", "objects": 5, "file": "{stem}", "stem": "list", "field": "image"}
    model = {"name": "SegAhnet", "args": {"weights": "{NOBODY_ASKS_FOR_THIS}"}}
    config = write_config(tmp_path, variance=2.25, **variables, train={**part, "model": model})
    with load(config, DATA_ROOT=data, objects=6, unused="taken, as an environment may hold more") as pipelines:
        dataset = pipelines.train.dataset
        assert (dataset.cache_num, dataset.replace_num, pipelines.train.loader.batch_size) == (6, 1, 6)
        assert sf.split(dataset.source.pipeline).random.transforms[0].rand_gaussian_noise.std == 1.5


def test_a_bad_file_stops_training_with_its_path(tmp_path: Path) -> None:
    make_data(tmp_path)
    path = tmp_path / "labels/6.nii"
    path.write_bytes(path.read_bytes()[:-40])
    with open_(tmp_path, tmp_path, train=section(CACHED, LOAD)) as pipelines:
        with pytest.raises(Exception) as caught:  # noqa: PT011 (MONAI's error depends on the file)
            numbers(itertools.chain.from_iterable(itertools.repeat(pipelines.train)))
        assert any(str(path) in note for note in caught.value.__notes__)


def test_a_sample_of_another_size_is_named(tmp_path: Path) -> None:
    make_data(tmp_path)
    write(tmp_path / "images/5.nii.gz", volume(5, (4, 5, 7)))
    message = r"(?s)\[1, 4, 5, 7\].*\[channels, 4, 5, 6\].*sample 5 .*5\.nii\.gz"
    part = section(PLAIN, LOAD)
    with open_(tmp_path, tmp_path, train=part) as pipelines, pytest.raises(sf.InputError, match=message):
        numbers(pipelines.train)


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
    assert apply("CropFixedSizeRandomCenter", image, size=[2, 2, 2]).shape == (1, 2, 2, 2)
    flipped = apply("RandomAxisFlip", image, probability=1.0)
    assert any(torch.equal(flipped, image.flip(axis)) for axis in (1, 2, 3))
    assert torch.equal(apply("RandomAxisFlip", image, probability=0.0), image)
    assert abs(apply("AddGaussianNoise", torch.zeros(1, 30, 30, 30), probability=1.0, variance=4.0).std() - 2) < 0.1


def test_configurations_of_the_published_kind(data: Path, tmp_path: Path) -> None:
    scale = {"fields": "image", "a_min": -57, "a_max": 164, "b_min": 0, "b_max": 1, "clip": True}
    steps, size = [*LOAD, {"name": "ScaleIntensityRange", "args": scale}, CROP, FLIP], {"output_crop_size": [3, 3, 3]}
    rates = {"train": 0, "validate": 0.1}
    parts = {name: section(CACHED, steps, replace_percent=rate, **size) for name, rate in rates.items()}
    path = write_config(tmp_path, DATA_ROOT=str(data), DATASET_JSON=str(data / "list.json"), **parts)
    with load(path, seed=0) as pipelines:
        for batch in itertools.chain(*[pipelines.train] * 2, *[pipelines.validate] * 2):
            assert batch["image"].shape == batch["label"].shape == (2, 1, 3, 3, 3)
            del batch


IMAGE = "images/0.nii.gz"


def refused(tmp_path: Path, part: dict[str, Any], message: str, **variables: Any) -> None:
    path = write_config(tmp_path, train=part)
    with pytest.raises(sf.InputError, match=message):
        load(path, **variables)


def step(name: str, **args: Any) -> dict[str, Any]:
    return section(CACHED, [LOAD[0], {"path" if "." in name else "name": name, "args": args}])


def pipeline(entry: Any) -> dict[str, Any]:
    return {**section(CACHED, LOAD), "image_pipeline": entry}


WRONG: list[tuple[dict[str, Any], str]] = [
    (section(CACHED, LOAD, data_list_key=None), r"'data_list_key' is missing: give a key of the data list"),
    (section(CACHED, LOAD, num_cache_object=3), r"no argument 'num_cache_object': use .*num_cache_objects"),
    (section(CACHED, LOAD, replace_percent=10), r"replace_percent is 10, expected 0 to 1 .*0\.1 is a tenth"),
    (section(CACHED, LOAD, output_data_dims=2), r"output_crop_size is \[4, 5, 6\], expected 2 numbers"),
    (section(CACHED, LOAD, output_data_format="channels_last"), r"expected 'channels_first'; leave the argument out"),
    (pipeline(None), r"image_pipeline is None, expected an object"),
    (pipeline({"args": {}}), r'image_pipeline is .*, expected "name" for what is known here'),
    (pipeline({"name": "A", "arguments": {}}), r"unknown key 'arguments': use name, path, args"),
    (pipeline({"name": "A", "args": []}), r"image_pipeline\.args is \[\], expected an object"),
    (pipeline({"name": "KerasPipeline"}), r"is 'KerasPipeline', expected one of Seg"),
    (section(CACHED, []), r"pre_transforms is \[\], expected a list of transforms"),
    ({"image_pipeline": {}}, r"pre_transforms is missing: a section needs"),
    (step("LoadNitfi"), r"transforms\[1\].*'LoadNitfi', expected a transform of MONAI, or of Clara: LoadNifti,"),
    (step("ScaleIntensityRange", fields="image"), r"'a_min'.*its arguments are fields, a_min, a_max"),
    (step("RandFlipd", keys="image", probability=1), r"\(RandFlipd\).*its arguments are keys"),
    (step("clara_data.Nothing"), r"'clara_data\.Nothing' cannot be imported"),
    (step("collections.OrderedDict"), r"is no transform: its instances cannot be called"),
]


@pytest.mark.parametrize(("part", "message"), WRONG)
def test_bad_configurations(part: dict[str, Any], message: str, data: Path, tmp_path: Path) -> None:
    refused(tmp_path, part, rf"train\..*{message}", DATASET_JSON=data / "list.json", DATA_ROOT=data)


@pytest.mark.parametrize("module", ["monai.transforms", "nibabel"])
def test_without_a_package(module: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    path, message = write_config(tmp_path, train=section(CACHED, LOAD)), f"needs the package '{module.split('.')[0]}'"
    with pytest.raises(sf.MissingExtraError, match=rf"LoadNifti {message}.*stallfree\[medical\]"):
        load(path, DATASET_JSON=data / "list.json", DATA_ROOT=data)


def test_bad_files(tmp_path: Path) -> None:
    path, unreadable = tmp_path / "train_config.json", r"the configuration .*train_config\.json' cannot be read as JSON"
    for content, message in ((None, unreadable), ("{", unreadable), ("{}", 'has neither a section "train" nor "valid')):
        if content is not None:
            path.write_text(content)
        with pytest.raises(sf.InputError, match=message):
            load(path)


@pytest.mark.parametrize(("variables", "message"), [
    ({"DATA_ROOT": ""}, r"is '\{DATASET_JSON\}', and nothing says .* \{DATASET_JSON\} .*DATASET_JSON=\.\.\."),
    ({"DATA_ROOT": "", "DATASET_JSON": "a"}, r"train\.pre_transforms\[1\]\.args\.fields\[1\] is '\{second\}'"),
    ({"DATASET_JSON": "{x}/a", "x": "{DATASET_JSON}"}, r"stands for itself \(DATASET_JSON -> x -> DATASET_JSON\)"),
])  # fmt: skip
def test_bad_placeholders(variables: dict[str, str], message: str, tmp_path: Path) -> None:
    noise = {"name": "AddGaussianNoise", "args": {"fields": ["image", "{second}"]}}
    refused(tmp_path, section(CACHED, [LOAD[0], noise]), message, **variables)


@pytest.mark.parametrize(("kind", "content", "message"), [
    (CACHED, {"testing": []}, r"has no 'training': set data_list_key to one of its lists \('testing'\)"),
    (CACHED, {"training": []}, r"'training' of the data list .*is \[\], expected at least one"),
    (CACHED, {"training": [{"image": IMAGE}]}, r"training\[0\] .*expected \{\"image\": path, \"label\""),
    (CACHED, {"training": [{"image": IMAGE, "label": 1}]}, r"label=1, .*ClassificationImagePipeline"),
    (NUMBERS, {"training": [{"image": 3, "label": 1}]}, r"image=3, expected the path of one file"),
    (NUMBERS, {"training": [{"image": IMAGE, "label": 10**400}]}, r"label=1000.* expected a number.*Segmentation"),
    (NUMBERS, {"training": [{"image": IMAGE, "label": one} for one in (1, [1, 2])]}, r"\[1\].*first label is 1"),
])  # fmt: skip
def test_bad_data_lists(kind: str, content: Any, message: str, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "data_list.json"
    path.write_text(json.dumps(content))
    part = section(kind, LOAD if kind == CACHED else LOAD_IMAGE)
    refused(tmp_path, part, message, DATASET_JSON=path, DATA_ROOT=data)
    path.unlink()
    refused(tmp_path, part, r"the data list .*data_list\.json' cannot", DATASET_JSON=path, DATA_ROOT=data)
