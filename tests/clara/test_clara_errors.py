"""What cannot be used is one clear error, before anything is started."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clara_data import LOAD, LOAD_IMAGE, NOISE, make_data, section, write_config

import stallfree as sf
from stallfree.clara import load

CACHED = "SegmentationImagePipelineWithCache"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a data set."""
    root = tmp_path_factory.mktemp("clara")
    make_data(root, 3)
    return root


def refused(tmp_path: Path, data: Path, config: dict[str, Any], message: str, list_: Path | None = None) -> None:
    path = write_config(tmp_path, **config)
    with pytest.raises(sf.InputError, match=message):
        load(path, DATASET_JSON=list_ or data / "list.json", DATA_ROOT=data)


ARGUMENTS = [
    ({"data_list_file_path": None}, r"'data_list_file_path' is missing: give the path of the data list"),
    ({"data_file_base_dir": None}, r"'data_file_base_dir' is missing"),
    ({"data_list_key": None}, r"'data_list_key' is missing"),
    ({"output_crop_size": None}, r"'output_crop_size' is missing"),
    ({"num_cache_objects": None}, r"'num_cache_objects' is missing"),
    ({"num_cache_object": 3}, r"'num_cache_object' is unknown: did you mean 'num_cache_objects'"),
    ({"zzz": 3}, r"'zzz' is unknown: use data_list_file_path"),
    ({"data_list_file_path": 3}, r"data_list_file_path=3, expected the path"),
    ({"data_list_key": ""}, r"data_list_key=''"),
    ({"output_crop_size": 96}, r"output_crop_size=96, expected a list of 2 or 3"),
    ({"output_crop_size": [96, 0, 96]}, r"output_crop_size=\[96, 0, 96\]"),
    ({"output_crop_size": [96, 1.5, 96]}, r"output_crop_size=\[96, 1.5, 96\]"),
    ({"output_batch_size": 0}, r"output_batch_size=0, expected samples per batch, an int of 1 or more"),
    ({"num_workers": -1}, r"num_workers=-1"),
    ({"num_workers": True}, r"num_workers=True"),
    ({"prefetch_size": "1"}, r"prefetch_size='1'"),
    ({"num_cache_objects": 0}, r"num_cache_objects=0"),
    ({"replace_percent": 10}, r"replace_percent=10, expected the share .*0\.1 is a tenth"),
    ({"replace_percent": -0.1}, r"replace_percent=-0.1"),
    ({"shuffle": 1}, r"shuffle=1, expected true or false"),
    ({"output_data_dims": 2}, r"output_data_dims=2 and output_crop_size=\[4, 5, 6\]"),
    ({"output_data_dims": 4}, r"output_data_dims=4"),
    (
        {"output_data_format": "channels_last"},
        r"='channels_last', expected .channels_first.; other values are not supported",
    ),
    ({"duplicate_count": 2}, r"duplicate_count=2, expected 1; other"),
    ({"batched_by_transforms": True}, r"batched_by_transforms=True, expected false"),
    ({"output_label_format": [2]}, r"output_label_format=\[2\], expected 1 for each"),
]


@pytest.mark.parametrize(("changes", "message"), ARGUMENTS)
def test_arguments(changes: dict[str, Any], message: str, data: Path, tmp_path: Path) -> None:
    refused(tmp_path, data, {"validate": section(CACHED, LOAD, **changes)}, rf"validate\.image_pipeline.*{message}")


def test_arguments_of_a_cache_without_a_cache(data: Path, tmp_path: Path) -> None:
    part = section("SegmentationImagePipeline", LOAD, num_cache_objects=3)
    refused(tmp_path, data, {"train": part}, r"'num_cache_objects' is an argument of the pipelines with a cache")


def without(part: str) -> Callable[[dict[str, Any]], Any]:
    return lambda train: train.pop(part)


def with_(part: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda train: train.update({part: value})


SECTIONS = [
    (without("image_pipeline"), r"train\.image_pipeline is missing"),
    (without("pre_transforms"), r"train\.pre_transforms is missing"),
    (with_("image_pipeline", 3), r"train\.image_pipeline is 3, expected an object"),
    (with_("image_pipeline", {"args": {}}), r"train\.image_pipeline has name='' and path='': give one of them"),
    (with_("image_pipeline", {"name": "A", "path": "b.C"}), r"name='A' and path='b.C'"),
    (with_("image_pipeline", {"name": "A", "arguments": {}}), r"unknown key 'arguments': use name, path, args"),
    (with_("image_pipeline", {"name": "A", "args": []}), r"train\.image_pipeline\.args is \[\], expected an object"),
    (
        with_("image_pipeline", {"name": "KerasPipeline"}),
        r"'KerasPipeline' is no pipeline known here: use Seg",
    ),
    (with_("image_pipeline", {"path": "my.Pipeline"}), r"'my\.Pipeline' is no pipeline"),
    (with_("pre_transforms", []), r"train\.pre_transforms is \[\], expected a list of transforms"),
    (with_("pre_transforms", {}), r"train\.pre_transforms is \{\}, expected a list"),
]


@pytest.mark.parametrize(("change", "message"), SECTIONS)
def test_sections(change: Callable[[dict[str, Any]], Any], message: str, data: Path, tmp_path: Path) -> None:
    train = copy.deepcopy(section(CACHED, LOAD))
    change(train)
    refused(tmp_path, data, {"train": train}, message)


FIELDS = {"fields": "image"}
TRANSFORMS = [
    ({"name": "LoadNitfi"}, r"'LoadNitfi' is a transform neither of Clara nor of MONAI: .*LoadNifti, Conv.*path"),
    ({"name": "set_determinism"}, r"neither of Clara nor of MONAI"),
    ({"name": "ScaleIntensityRange", "args": FIELDS}, r"'a_min'.*its arguments are fields, a_min, a_max"),
    ({"name": "ConvertToChannelsFirst", "args": {"field": "image"}}, r"\(ConvertToChannelsFirst\).*are fields"),
    ({"name": "LoadNifti", "args": {**FIELDS, "dtype": "text"}}, r"\(LoadNifti\) cannot be made: .*'text'"),
    ({"name": "ScaleToShape", "args": {**FIELDS, "target_shape": 3}}, r"\(ScaleToShape\) cannot be made"),
    ({"name": "AddGaussianNoise", "args": {**FIELDS, "variance": -1}}, r"\(AddGaussianNoise\) cannot be made"),
    ({"name": "CropFixedSizeRandomCenter", "args": {**FIELDS, "size": [1, 1, 1], "max_displacement": 1}}, r"max_disp"),
    ({"name": "RandFlipd", "args": {"keys": "image", "probability": 1}}, r"\(RandFlipd\).*its arguments are keys"),
    ({"path": "clara_data.Nothing"}, r"'clara_data\.Nothing' cannot be imported"),
    ({"path": "no_such_module.Class"}, r"'no_such_module\.Class' cannot be imported"),
    ({"path": "Class"}, r"'Class' cannot be imported.*module\.Class"),
    ({"path": "clara_data.SHAPE"}, r"'clara_data\.SHAPE' is a tuple, expected a class"),
    ({"path": "clara_data.NoTransform"}, r"is no transform: its instances cannot be called"),
    ("LoadNifti", r"is 'LoadNifti', expected an object"),
]


@pytest.mark.parametrize(("entry", "message"), TRANSFORMS)
def test_transforms(entry: Any, message: str, data: Path, tmp_path: Path) -> None:
    refused(tmp_path, data, {"train": section(CACHED, [LOAD[0], entry])}, rf"train\.pre_transforms\[1\].*{message}")


@pytest.mark.parametrize(("package", "module"), [("monai", "monai.transforms"), ("nibabel", "nibabel")])
def test_without_a_package(
    package: str, module: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    path = write_config(tmp_path, train=section(CACHED, LOAD))
    with pytest.raises(sf.MissingExtraError, match=rf"LoadNifti needs the package '{package}'.*stallfree\[medical\]"):
        load(path, DATASET_JSON=data / "list.json", DATA_ROOT=data)


FILES = [
    (None, r"the configuration .*train_config\.json' cannot be read"),
    (b"{", r"the configuration .*is no valid JSON"),
    (b"\xff\xfe{", r"is no valid JSON"),
    (b"[]", r"holds a list, expected an object"),
    (b"{}", r'has neither a section "train" nor "validate"'),
    (b'{"train": []}', r"train is a list, expected an object"),
]


@pytest.mark.parametrize(("content", "message"), FILES)
def test_files(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train_config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(sf.InputError, match=message):
        load(path)


def test_placeholders_that_nothing_stands_for(tmp_path: Path) -> None:
    path = write_config(tmp_path, train=section(CACHED, LOAD))
    message = r"data_list_file_path is '\{DATASET_JSON\}', and nothing says what \{DATASET_JSON\} .*DATASET_JSON=\.\.\."
    with pytest.raises(sf.InputError, match=message):
        load(path, DATA_ROOT=tmp_path)
    noise = {"name": "AddGaussianNoise", "args": {"fields": ["image", "{second}"]}}
    path = write_config(tmp_path, train=section(CACHED, [LOAD[0], noise]))
    with pytest.raises(sf.InputError, match=r"train\.pre_transforms\[1\]\.args\.fields\[1\] is '\{second\}'"):
        load(path, DATA_ROOT=tmp_path, DATASET_JSON="list.json")


def test_placeholders_that_stand_for_themselves(tmp_path: Path) -> None:
    path = write_config(tmp_path, train=section(CACHED, LOAD))
    with pytest.raises(
        sf.InputError, match=r"\{DATA_ROOT\} stands for itself \(\{DATA_ROOT\} -> \{x\} -> \{DATA_ROOT\}"
    ):
        load(path, DATA_ROOT="{x}/a", x="{DATA_ROOT}", DATASET_JSON="list.json")


IMAGE = "images/0.nii.gz"
LISTS = [
    (CACHED, {"testing": []}, r"has no 'training': set data_list_key to one of its lists \('testing'\)"),
    (CACHED, {"name": "x"}, r"has no 'training'.*it has none"),
    (CACHED, {"training": []}, r"'training' of the data list .*is empty"),
    (CACHED, {"training": {}}, r"'training' of the data list .*is dict"),
    (CACHED, {"training": ["a.nii"]}, r"training\[0\] of the data list .* is 'a\.nii', expected"),
    (CACHED, {"training": [{"image": IMAGE}]}, r"training\[0\] .*expected \{\"image\": path, \"label\""),
    (CACHED, {"training": [{"image": 3, "label": "a"}]}, r"image=3, expected the path of one file"),
    (CACHED, {"training": [{"image": [IMAGE], "label": "a"}]}, r"image=\['images/0"),
    (CACHED, {"training": [{"image": IMAGE, "label": 1}]}, r"label=1, and Seg.*ClassificationImagePipeline"),
    ("Class", {"training": [{"image": IMAGE, "label": "a.nii"}]}, r"label='a\.nii', expected a number.*Segmentation"),
    ("Class", {"training": [{"image": IMAGE, "label": []}]}, r"label=\[\], expected a number"),
    ("Class", {"training": [{"image": IMAGE, "label": True}]}, r"label=True, expected a number"),
    ("Class", {"training": [{"image": IMAGE, "label": 10**400}]}, r"label=1000.* expected a number"),
    ("Class", {"training": [{"image": IMAGE, "label": float("nan")}]}, r"label=nan, expected a number"),
    (
        "Class",
        {"training": [{"image": IMAGE, "label": 1}, {"image": IMAGE, "label": [1, 2]}]},
        r"training\[1\] .*label=\[1, 2\] and the first label is 1",
    ),
]


@pytest.mark.parametrize(("kind", "content", "message"), LISTS)
def test_data_lists(kind: str, content: Any, message: str, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "data_list.json"
    path.write_text(json.dumps(content))
    part = section(kind, LOAD) if kind == CACHED else section("ClassificationImagePipeline", LOAD_IMAGE)
    refused(tmp_path, data, {"train": part}, message, path)


def test_a_data_list_that_is_not_there(data: Path, tmp_path: Path) -> None:
    refused(tmp_path, data, {"train": section(CACHED, LOAD)}, r"the data list .*gone\.json' cannot", data / "gone.json")


def test_nothing_is_left_open_when_the_second_section_fails(data: Path, tmp_path: Path) -> None:
    """The fixture of all tests looks for what is left."""
    late = section(CACHED, [NOISE], data_list_key="validation")  # its first sample cannot be prepared
    path = write_config(tmp_path, train=section(CACHED, LOAD, num_cache_objects=2), validate=late)
    with pytest.raises(Exception, match=r"sample \d"):
        list(load(path, DATASET_JSON=data / "list.json", DATA_ROOT=data).validate or ())


@pytest.mark.parametrize(
    ("kind", "transforms", "message"),
    [
        ("SegmentationImagePipeline", [LOAD[0]], r"comes out with shape \[4, 5, 6\].*\[channels, 4, 5, 6\]"),
        ("SegmentationImagePipeline", LOAD_IMAGE, r"field 'label' comes out as str: no transform loads it"),
        ("SegmentationImagePipeline", [{"path": "clara_data.Own"}], r"field 'label' comes out as str"),
    ],
)
def test_transforms_that_do_not_fit(kind: str, transforms: list[Any], message: str, data: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, train=section(kind, transforms))
    with load(path, DATASET_JSON=data / "list.json", DATA_ROOT=data) as pipelines:
        assert pipelines.train is not None
        with pytest.raises(sf.InputError, match=message):
            next(iter(pipelines.train))
