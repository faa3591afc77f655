"""Small volumes, data lists and configurations for the tests of Clara's pipelines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stallfree import mark_deterministic

Json = dict[str, Any]

BOTH = ["image", "label"]
LOAD: list[Json] = [{"name": name, "args": {"fields": BOTH}} for name in ("LoadNifti", "ConvertToChannelsFirst")]
LOAD_IMAGE: list[Json] = [{**step, "args": {"fields": "image"}} for step in LOAD]
NOISE: Json = {"name": "AddGaussianNoise", "args": {"fields": "image", "probability": 1.0, "variance": 0.01}}
SHAPE = (4, 5, 6)


def volume(number: float, shape: Sequence[int] = SHAPE) -> np.ndarray[Any, Any]:
    """All voxels are `number`, but for a gradient below 0.5 along the last axis."""
    return np.full(shape, number, np.float32) + np.linspace(0, 0.25, shape[-1], dtype=np.float32)


def write(path: Path, array: np.ndarray[Any, Any], spacing: Sequence[float] = (1, 1, 1), two: bool = False) -> None:
    import nibabel

    path.parent.mkdir(parents=True, exist_ok=True)
    kind = nibabel.Nifti2Image if two else nibabel.Nifti1Image
    image = kind(array, np.diag([*spacing, *[1] * (4 - len(spacing))]))
    image.header.set_zooms([*spacing, *[1] * (array.ndim - len(spacing))])
    nibabel.save(image, path)


def make_data(root: Path, samples: int = 10, shape: Sequence[int] = SHAPE) -> Path:
    """`samples` images and label volumes beneath `root`; sample n is all n. The last two are for validation.

    Gives the path of a data list for segmentation; beside it is `numbers.json`, for classification.
    """
    seg, cls = [], []
    for n in range(samples):
        write(root / f"images/{n}.nii.gz", volume(n, shape))
        write(root / f"labels/{n}.nii", np.full(shape, n, np.uint8))
        seg.append({"image": f"images/{n}.nii.gz", "label": f"./labels/{n}.nii", "note": "ignored"})
        cls.append({"image": f"./images/{n}.nii.gz", "label": n})
    for name, entries in (("list.json", seg), ("numbers.json", cls)):
        (root / name).write_text(json.dumps({"training": entries[:-2], "validation": entries[-2:], "labels": {}}))
    return root / "list.json"


def section(kind: str, transforms: Sequence[Json], **args: Any) -> Json:
    """A section of a configuration; None removes an argument."""
    all_args = {
        "data_list_file_path": "{DATASET_JSON}", "data_file_base_dir": "{DATA_ROOT}", "data_list_key": "training",
        "output_crop_size": list(SHAPE), "output_batch_size": 2, "num_workers": 0, "prefetch_size": 0,
        **({"num_cache_objects": 4, "replace_percent": 0.25} if kind.endswith("WithCache") else {}), **args,
    }  # fmt: skip
    given = {name: value for name, value in all_args.items() if value is not None}
    return {"image_pipeline": {"name": kind, "args": given}, "pre_transforms": list(transforms)}


def write_config(root: Path, **parts: Any) -> Path:
    path = root / "train_config.json"
    path.write_text(json.dumps({"epochs": 5, "learning_rate": 1e-4, **parts}))
    return path


@mark_deterministic
class Own:
    """A transform of the user's own that reads files: gets paths."""

    def __init__(self, fields: str = "image") -> None:
        self.fields = fields

    def __call__(self, sample: Json) -> Json:
        import nibabel

        assert isinstance(sample[self.fields], str)
        array = np.asarray(nibabel.load(sample[self.fields]).dataobj, np.float32)
        return {**sample, self.fields: array[None]}
