"""`load`: builds the data pipelines of a configuration."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stallfree.clara.arguments import Arguments, parse
from stallfree.clara.configuration import Variables, component, read_json
from stallfree.clara.data_list import DataListSource, read_data_list
from stallfree.clara.registry import make_transforms, reads_bytes
from stallfree.datasets.smart_cache import SmartCacheDataset
from stallfree.errors import InputError, StallfreeWarning, clara_configuration, clara_field
from stallfree.ipc.folders import is_path
from stallfree.loader.dataloader import DataLoader
from stallfree.pipeline.compose import Compose, mark_deterministic
from stallfree.units import parse_whole


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
        # needs nibabel
        with sf.clara.load("train_config.json", DATASET_JSON="list.json", DATA_ROOT=".") as pipelines:
            print(len(pipelines.train), pipelines.train.dataset.stats().lag)
        ```
    """

    def __init__(self, name: str, dataset: SmartCacheDataset | DataListSource, loader: DataLoader) -> None:
        self.name = name
        self.dataset = dataset
        self.loader = loader

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

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{self.name}({self.dataset!r}, {len(self)} batches)"


@dataclass(frozen=True)
class Pipelines:
    """The pipelines of a configuration.

    Attributes:
        train: pipeline of the section `train`; None if there is no such section.
        validate: pipeline of the section `validate`; None if there is no such section.

    Example:
        ```python
        # needs nibabel
        with sf.clara.load("train_config.json", DATASET_JSON="list.json", DATA_ROOT=".") as pipelines:
            print(pipelines.train, pipelines.validate)
        ```
    """

    train: Pipeline | None
    validate: Pipeline | None

    def close(self) -> None:
        """Close both pipelines. Idempotent."""
        for pipeline in (self.train, self.validate):
            if pipeline is not None:
                pipeline.close()

    def __enter__(self) -> Pipelines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(config: str | os.PathLike[str], /, *, seed: int | None = None, **variables: Any) -> Pipelines:
    """Build the data pipelines of a training configuration of NVIDIA's Clara Train SDK.

    The configuration is JSON, of release 3.x.

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
        MissingExtraError: volumes are to be read and `nibabel` is not installed.
        OSError: none of the first samples of a cache can be read.

    Example:
        ```python
        # needs nibabel
        with sf.clara.load("train_config.json", DATASET_JSON="list.json", DATA_ROOT=".") as pipelines:
            for batch in pipelines.train:
                train(batch["image"], batch["label"])
        ```
    """
    if not is_path(config):
        raise InputError(f"config={config!r:.80}: give the path of a configuration in JSON")
    seed, text = None if seed is None else parse_whole(seed, "seed"), os.fspath(config)
    found = read_json(text, "the configuration")
    sections = [name for name in ("train", "validate") if name in found]
    if not sections:
        raise clara_configuration(
            f'the configuration {text!r} has neither a section "train" nor "validate": nothing to build'
        )
    fill = Variables(found, variables)
    plans = {name: _plan(found[name], name, fill) for name in sections}
    for arguments, _ in plans.values():
        for advice in arguments.advice():
            warnings.warn(advice, StallfreeWarning, stacklevel=2)
    with contextlib.ExitStack() as undo:
        made = {}
        for name, (arguments, source) in plans.items():
            made[name] = _build(arguments, source, seed)
            undo.callback(made[name].close)
        undo.pop_all()
    return Pipelines(made.get("train"), made.get("validate"))


def _plan(section: Any, name: str, variables: Variables) -> tuple[Arguments, DataListSource]:
    """Return the arguments and the source of a section, without starting anything."""
    if not isinstance(section, dict):
        raise clara_configuration(f"{name} is a {type(section).__name__}, expected an object: {{...}}")
    for key in ("image_pipeline", "pre_transforms"):
        if key not in section:
            raise clara_configuration(f"{name}.{key} is missing: a section needs image_pipeline and pre_transforms")
    place = f"{name}.image_pipeline"
    arguments = parse(component(variables.fill(section["image_pipeline"], place), place), training=name == "train")
    place = f"{name}.pre_transforms"
    steps = make_transforms(variables.fill(section["pre_transforms"], place), place)
    images, labels = read_data_list(arguments)
    pipeline = Compose([*steps, Output(arguments)])
    return arguments, DataListSource(images, labels, pipeline, read=reads_bytes(steps))


def _build(arguments: Arguments, source: DataListSource, seed: int | None) -> Pipeline:
    dataset: SmartCacheDataset | DataListSource = source
    if arguments.cached:
        dataset = SmartCacheDataset(
            source,
            cache_num=arguments.num_cache_objects,
            replace_rate=arguments.replace_percent,
            seed=seed,
            shuffle=arguments.shuffle,
        )
    ahead = math.ceil(arguments.prefetch_size / max(1, arguments.num_workers))  # batches in flight per worker
    loader = DataLoader(
        dataset,
        batch_size=arguments.output_batch_size,
        shuffle=arguments.shuffle,
        num_workers=arguments.num_workers,
        prefetch_factor=ahead or None,
        seed=seed,
    )
    return Pipeline(arguments.name, dataset, loader)


@mark_deterministic
class Output:
    """The last step: image and label as tensors, of the size stated in the configuration.

    Raises `InputError` for a sample of another size.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.size = arguments.output_crop_size
        self.channels = arguments.output_image_channels
        self.volumes = arguments.volumes

    def __call__(self, sample: Any) -> dict[str, torch.Tensor]:
        if not isinstance(sample, Mapping) or not {"image", "label"} <= sample.keys():
            what = f"a {type(sample).__name__}"
            if isinstance(sample, Mapping):
                what = f"the fields {', '.join(map(repr, sample))}"
            raise clara_field(f"the transforms gave {what}, expected one sample with the fields 'image' and 'label'")
        image, label = _tensor(sample["image"], "image"), _tensor(sample["label"], "label")
        self._check(image, "image", self.channels)
        if self.volumes:
            self._check(label, "label", None)
        return {"image": image.to(torch.float32), "label": label}

    def _check(self, volume: torch.Tensor, field: str, channels: int | None) -> None:
        got = tuple(volume.shape)
        wanted = (-1 if channels is None else channels, *self.size)
        if len(got) != len(wanted) or any(want not in (-1, have) for have, want in zip(got, wanted, strict=True)):
            text = ["channels" if channels is None else channels, *("any" if n == -1 else n for n in self.size)]
            raise clara_field(
                f"field {field!r} comes out with shape {list(got)}, and output_crop_size={list(self.size)} asks for "
                f"[{', '.join(map(str, text))}]: crop, pad or resample it in pre_transforms, or change output_crop_size"
            )

    def __repr__(self) -> str:
        return f"Output({list(self.size)})"


def _tensor(value: Any, field: str) -> torch.Tensor:
    """Return `value` as a plain contiguous tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor).contiguous()
    if isinstance(value, (np.ndarray, np.generic, int, float)):
        return torch.from_numpy(np.asarray(value, order="C"))
    raise clara_field(f"field {field!r} comes out as {type(value).__name__}: no transform loads it")
