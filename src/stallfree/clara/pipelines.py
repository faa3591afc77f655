"""`load`: builds the data pipelines of a configuration."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stallfree import errors
from stallfree.clara import configuration
from stallfree.datasets.smart_cache import SmartCacheDataset
from stallfree.ipc.folders import is_path
from stallfree.loader.dataloader import DataLoader
from stallfree.pipeline.compose import Compose, mark_deterministic
from stallfree.pipeline.fingerprint import fingerprint
from stallfree.sources.mapped import BaseSource
from stallfree.sources.paths import PathList, canonical, is_url, joined
from stallfree.typevars import Closing
from stallfree.units import parse_whole

Labels = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Pipeline:
    """The data of one section.

    Iterating it yields the batches of one epoch: `{"image": tensor, "label": tensor}`.

    Images are float32 of shape (batch, channels, *axes). Labels are volumes of the same form, or numbers of shape
    (batch,) or (batch, numbers): int64, or float32 if any is not an integer.

    Attributes:
        name: name of the pipeline, as in the configuration.
        dataset: a `SmartCacheDataset`, or the plain source.
        loader: its `stallfree.DataLoader`.

    Example:
        ```python
        # needs monai
        with sf.clara.load("train_config.json", DATASET_JSON="list.json", DATA_ROOT=".") as pipelines:
            print(len(pipelines.train), pipelines.train.dataset.stats().lag)
        ```
    """

    name: str
    dataset: SmartCacheDataset | BaseSource
    loader: DataLoader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return len(self.loader)

    def close(self) -> None:
        """End workers and fill processes, and leave the cache. Idempotent."""
        self.loader.close()
        if isinstance(self.dataset, SmartCacheDataset):
            self.dataset.close()


@dataclass(frozen=True)
class Pipelines(Closing):
    """The pipelines of a configuration.

    Attributes:
        train: pipeline of the section `train`; None if there is no such section.
        validate: pipeline of the section `validate`; None if there is no such section.

    Example:
        ```python
        # needs monai
        with sf.clara.load("train_config.json", DATASET_JSON="list.json", DATA_ROOT=".") as pipelines:
            print(pipelines.train, pipelines.validate)
        ```
    """

    train: Pipeline | None = None
    validate: Pipeline | None = None

    def close(self) -> None:
        """Close both pipelines. Idempotent."""
        for pipeline in (self.train, self.validate):
            if pipeline is not None:
                pipeline.close()


def load(config: str | os.PathLike[str], /, *, seed: int | None = None, **variables: Any) -> Pipelines:
    """Build the data pipelines of a training configuration of NVIDIA's Clara Train SDK.

    The configuration is JSON, of release 3.x. Its transforms are made of MONAI's classes.

        with load("train_config.json", DATASET_JSON="/data/list.json", DATA_ROOT="/data") as pipelines:
            for batch in pipelines.train:
                step(batch["image"], batch["label"])

    Of the sections `train` and `validate`, only `image_pipeline` and `pre_transforms` are read.

    Args:
        config: path of the configuration, local or a fsspec URL.
        seed: seed of order and augmentation; drawn from torch's generator if None.
        variables: values of the placeholders in the configuration's strings, `{DATA_ROOT}` for instance. They override
            values of the same name at the top of the configuration.

    Raises:
        InputError: the configuration or the data list is invalid; the message names the position.
        MissingExtraError: `monai` or `nibabel` is not installed.
        OSError: none of the first samples of a cache can be read.

    Example:
        ```python
        # needs monai
        with sf.clara.load("train_config.json", DATASET_JSON="list.json", DATA_ROOT=".") as pipelines:
            for batch in pipelines.train:
                train(batch["image"], batch["label"])
        ```
    """
    if not is_path(config):
        raise errors.InputError(f"config={config!r:.80}: give the path of a configuration in JSON")
    seed, text = None if seed is None else parse_whole(seed, "seed"), os.fspath(config)
    content = configuration.read_json(text, "the configuration")
    sections = [name for name in ("train", "validate") if name in content]
    if not sections:
        raise errors.clara_configuration(f'the configuration {text!r} has neither a section "train" nor "validate"')
    variables = {**{name: value for name, value in content.items() if not isinstance(value, dict)}, **variables}
    plans = {section: _plan(content[section], section, variables) for section in sections}  # before anything starts
    return Pipelines(**{section: _build(*plan, seed) for section, plan in plans.items()})


def _plan(section: Any, name: str, variables: Mapping[str, Any]) -> tuple[dict[str, Any], BaseSource]:
    """Return the arguments of the pipeline of a section and its source, without starting anything."""
    if not isinstance(section, dict):
        raise configuration.wrong(name, section, "an object: {...}")
    if missing := sorted({"image_pipeline", "pre_transforms"} - section.keys()):
        advice = "a section needs image_pipeline and pre_transforms"
        raise errors.clara_configuration(f"{name}.{missing[0]} is missing: {advice}")
    entry = configuration.fill(section["image_pipeline"], f"{name}.image_pipeline", variables)
    entries = configuration.fill(section["pre_transforms"], f"{name}.pre_transforms", variables)
    pipeline = configuration.component(entry, f"{name}.image_pipeline")
    args = configuration.parse(pipeline, training=name == "train")
    steps = configuration.make_transforms(entries, f"{name}.pre_transforms")
    steps.append(Output(args["output_crop_size"], args["output_image_channels"], volumes=args["volumes"]))
    return args, DataListSource(*_read_data_list(args, pipeline.where), Compose(steps))


def _build(args: dict[str, Any], source: BaseSource, seed: int | None) -> Pipeline:
    dataset: SmartCacheDataset | BaseSource = source
    shuffle, workers = args["shuffle"], args["num_workers"]
    if args["cached"]:
        size, rate = args["num_cache_objects"], args["replace_percent"]
        dataset = SmartCacheDataset(source, cache_num=size, replace_rate=rate, seed=seed, shuffle=shuffle)
    ahead = -(-args["prefetch_size"] // max(1, workers)) or None  # batches in flight per worker
    batch_size = args["output_batch_size"]
    loader = DataLoader(dataset, batch_size, shuffle, num_workers=workers, prefetch_factor=ahead, seed=seed)
    return Pipeline(args["name"], dataset, loader)


# -- the data list ----------------------------------------------------------------------------------------------------


class DataListSource(BaseSource):
    """Images with their labels, which are files (segmentation) or numbers (classification).

    `fetch(id)` returns `{"image": path, "label": path or numbers}`: the first transform loads the files. A file at a
    URL is copied to a local one before.

    Args:
        images: paths or fsspec URLs, one per sample.
        labels: paths or fsspec URLs, or an array with one row per sample.
        steps: pipeline applied to the fetched record.
    """

    def __init__(self, images: Sequence[str], labels: Sequence[str] | Labels, steps: Compose) -> None:
        self._images = PathList(images)
        self._labels = labels if isinstance(labels, np.ndarray) else PathList(labels)
        self.pipeline = steps

    def __len__(self) -> int:
        return len(self._images)

    def _record(self, id: int) -> dict[str, Any]:
        label: Any = self._labels[id]
        return {"image": _local(self._images[id]), "label": _local(label) if type(label) is str else label.copy()}

    def _where(self, id: int) -> str:
        return f"{self._images[id]}, {self._labels[id]}"

    def fingerprint(self) -> str:
        """Return a text that changes with any path or label, or the size of any of 256 local files, evenly spread."""
        return f"DataListSource {fingerprint(self._images, self._labels)}"


def _local(path: str) -> str:
    """Return `path`; for a URL, the path of a local copy."""
    if not is_url(path):
        return path
    import fsspec  # type: ignore[import-untyped]

    return fsspec.open_local(f"simplecache::{path}", simplecache={"same_names": True})  # type: ignore[no-any-return]


def _read_data_list(args: Mapping[str, Any], where: str) -> tuple[list[str], list[str] | Labels]:
    """Return the images and labels that the arguments name. Raises `InputError` for an invalid list."""
    path, key = args["data_list_file_path"], args["data_list_key"]
    content = configuration.read_json(path, "the data list")
    if key not in content:
        lists = ", ".join(repr(name) for name, value in content.items() if isinstance(value, list))
        advice = f"set data_list_key to one of its lists ({lists or 'it has none'})"
        raise errors.clara_configuration(f"{where}: the data list {path!r} has no {key!r}: {advice}")
    entries = content[key]
    if not isinstance(entries, list) or not entries:
        expected = 'at least one {"image": ..., "label": ...}'
        raise configuration.wrong(f"{key!r} of the data list {path!r}", entries, expected)
    for number, entry in enumerate(entries):
        if problem := _problem(entry, entries[0], args["volumes"]):
            raise errors.clara_configuration(f"{key}[{number}] of the data list {path!r}: {problem}")
    base = canonical(args["data_file_base_dir"])
    images, labels = [_join(base, entry["image"]) for entry in entries], [entry["label"] for entry in entries]
    if args["volumes"]:
        return images, [_join(base, label) for label in labels]
    numbers = np.array(labels)
    return images, numbers.astype(np.int64 if numbers.dtype.kind == "i" else np.float32)


def _problem(entry: Any, first: Any, volumes: bool) -> str:
    """Return why an entry of a data list cannot be used; "" if it can. All must have labels as the `first` has."""
    if not isinstance(entry, dict) or not {"image", "label"} <= entry.keys():
        return f'{entry!r}, expected {{"image": path, "label": path or numbers}}'
    image, label = entry["image"], entry["label"]
    if not configuration.is_text(image):
        return f"image={image!r}, expected the path of one file"
    if volumes:
        expected = "the path of a volume; for numbers use a ClassificationImagePipeline"
        return "" if configuration.is_text(label) else f"label={label!r}, expected {expected}"
    parts = label if isinstance(label, list) else [label]
    if not parts or not all(configuration.is_number(part) and -(2**63) <= part < 2**63 for part in parts):
        return f"label={label!r}, expected a number or a list of numbers; for volumes use a SegmentationImagePipeline"
    if np.shape(label) != np.shape(first["label"]):
        return f"label={label!r} and the first label is {first['label']!r}: give all the same form"
    return ""


def _join(base: str, path: str) -> str:
    """Return `path` below `base`; `path` itself if it is absolute or a URL."""
    return path if is_url(path) or os.path.isabs(path) else joined(base, os.path.normpath(path))


# -- the last step ----------------------------------------------------------------------------------------------------


@mark_deterministic
class Output:
    """The last step: image and label as tensors, of the size stated in the configuration.

    Raises `InputError` for a sample of another size.
    """

    def __init__(self, size: list[int], channels: int | None, *, volumes: bool) -> None:
        self.size, self.channels, self.volumes = size, channels, volumes

    def __call__(self, sample: Any) -> dict[str, torch.Tensor]:
        if not isinstance(sample, Mapping) or not {"image", "label"} <= sample.keys():
            fields = list(sample) if isinstance(sample, Mapping) else type(sample)
            raise errors.clara_field(f"the transforms gave {fields}, expected one sample with 'image' and 'label'")
        image = _tensor(sample, "image", (self.channels or -1, *self.size))
        label = _tensor(sample, "label", (-1, *self.size) if self.volumes else None)
        return {"image": image.to(torch.float32), "label": label}


def _tensor(sample: Mapping[Any, Any], field: str, size: tuple[int, ...] | None) -> torch.Tensor:
    """Return a field as a plain contiguous tensor of this `size`; -1 is any number."""
    value = sample[field]
    if isinstance(value, torch.Tensor):
        tensor = value.detach().as_subclass(torch.Tensor).contiguous()
    elif isinstance(value, (np.ndarray, np.generic, int, float)):
        tensor = torch.from_numpy(np.asarray(value, order="C"))
    else:
        raise errors.clara_field(f"field {field!r} comes out as {type(value).__name__}: no transform loads it")
    shape = list(tensor.shape)
    if size is not None and [n if n == -1 else have for have, n in zip(shape, size, strict=False)] != list(size):
        expected = ", ".join("any" if n == -1 else str(n) for n in size[1:])
        channels = "channels" if size[0] == -1 else size[0]
        problem = f"field {field!r} comes out with shape {shape}, output_crop_size is [{channels}, {expected}]"
        raise errors.clara_field(f"{problem}: crop, pad or resample it in pre_transforms")
    return tensor
