"""A configuration that cannot be used is one clear error, before anything is started."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from clara_data import LOAD, LOAD_IMAGE, make_data, section, write_config

import stallfree as sf
from stallfree.clara import load

CACHED, NUMBERS = "SegmentationImagePipelineWithCache", "ClassificationImagePipeline"
IMAGE = "images/0.nii.gz"


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
def test_configurations(part: dict[str, Any], message: str, data: Path, tmp_path: Path) -> None:
    refused(tmp_path, data, {"train": part}, rf"train\..*{message}")


@pytest.mark.parametrize(("package", "module"), [("monai", "monai.transforms"), ("nibabel", "nibabel")])
def test_without_a_package(
    package: str, module: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    path = write_config(tmp_path, train=section(CACHED, LOAD))
    with pytest.raises(sf.MissingExtraError, match=rf"LoadNifti needs the package '{package}'.*stallfree\[medical\]"):
        load(path, DATASET_JSON=data / "list.json", DATA_ROOT=data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"the configuration .*train_config\.json' cannot be read"),
        (b"{", r"the configuration .*is no valid JSON"),
        (b"{}", r'has neither a section "train" nor "validate"'),
    ],
)
def test_files(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train_config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(sf.InputError, match=message):
        load(path)


NOISE = {"name": "AddGaussianNoise", "args": {"fields": ["image", "{second}"]}}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"DATA_ROOT": ""}, r"is '\{DATASET_JSON\}', and nothing says .* \{DATASET_JSON\} .*DATASET_JSON=\.\.\."),
        ({"DATA_ROOT": "", "DATASET_JSON": "a"}, r"train\.pre_transforms\[1\]\.args\.fields\[1\] is '\{second\}'"),
        ({"DATASET_JSON": "{x}/a", "x": "{DATASET_JSON}"}, r"stands for itself \(DATASET_JSON -> x -> DATASET_JSON\)"),
    ],
)
def test_placeholders(variables: dict[str, str], message: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, train=section(CACHED, [LOAD[0], NOISE]))
    with pytest.raises(sf.InputError, match=message):
        load(path, **variables)


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (CACHED, {"testing": []}, r"has no 'training': set data_list_key to one of its lists \('testing'\)"),
        (CACHED, {"training": []}, r"'training' of the data list .*is \[\], expected at least one"),
        (CACHED, {"training": [{"image": IMAGE}]}, r"training\[0\] .*expected \{\"image\": path, \"label\""),
        (CACHED, {"training": [{"image": IMAGE, "label": 1}]}, r"label=1, .*ClassificationImagePipeline"),
        (NUMBERS, {"training": [{"image": 3, "label": 1}]}, r"image=3, expected the path of one file"),
        (NUMBERS, {"training": [{"image": IMAGE, "label": 10**400}]}, r"label=1000.* expected a number.*Segmentation"),
        (
            NUMBERS,
            {"training": [{"image": IMAGE, "label": 1}, {"image": IMAGE, "label": [1, 2]}]},
            r"training\[1\] .*label=\[1, 2\] and the first label is 1",
        ),
    ],
)
def test_data_lists(kind: str, content: Any, message: str, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "data_list.json"
    path.write_text(json.dumps(content))
    refused(tmp_path, data, {"train": section(kind, LOAD if kind == CACHED else LOAD_IMAGE)}, message, path)
    path.unlink()
    refused(tmp_path, data, {"train": section(kind, LOAD)}, r"the data list .*data_list\.json' cannot", path)
