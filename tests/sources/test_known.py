"""Data sets of torchvision and Hugging Face: cut where that changes nothing, else whole."""

import contextlib
import random
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from operator import add, neg
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset

import stallfree as sf
from loader_data import same
from stallfree.sources.cut import as_cut_source
from stallfree.sources.cut_source import CutSource
from stallfree.sources.mapped import MapSource, as_source

COUNT = 12


def of(module: str) -> Callable[[Any], Any]:
    """Makes a class, and the functions in it, say that they are from `module`."""

    def claim(cls: Any) -> Any:
        cls.__module__ = module
        for member in vars(cls).values():
            if callable(member):
                member.__module__ = module
        return cls

    return claim


@of("torchvision.datasets.vision")
class StandardTransform:
    def __init__(self, transform: Any, target_transform: Any) -> None:
        self.transform, self.target_transform = transform, target_transform

    def __call__(self, picture: Any, label: Any) -> Any:
        picture = picture if self.transform is None else self.transform(picture)
        return picture, label if self.target_transform is None else self.target_transform(label)


@of("torchvision.datasets.vision")
class VisionDataset:
    def __init__(self, transform: Any = None, target_transform: Any = None, transforms: Any = None) -> None:
        self.transform, self.target_transform = transform, target_transform
        if transform is not None or target_transform is not None:
            transforms = StandardTransform(transform, target_transform)
        self.transforms = transforms

    def __len__(self) -> int:
        return COUNT

    def read(self, id: int) -> Any:
        return np.full((2, 2), id, np.int64), id


@of("torchvision.datasets.cifar")
class Separate(VisionDataset):
    """Most classes: a transform for each part."""

    def __getitem__(self, id: int) -> Any:
        picture, label = self.read(id)
        if self.transform is not None:
            picture = self.transform(picture)
        if self.target_transform is not None:
            label = self.target_transform(label)
        return picture, label


@of("torchvision.datasets.voc")
class Joint(VisionDataset):
    """Segmentation: both parts at once."""

    def __getitem__(self, id: int) -> Any:
        return self.transforms(*self.read(id))


@of("torchvision.datasets.fakedata")
class Later(VisionDataset):
    """Something is made of what the transform returned."""

    def __getitem__(self, id: int) -> Any:
        return self.transform(self.read(id)[0]).sum(), id


Named = type("Named", (Separate,), {})  # reads as the library does
Own = type("Own", (Separate,), {"__getitem__": lambda self, id: self.transform(self.read(id)[0])})


@of("datasets.arrow_dataset")
class Rows:
    """Rows with a format, as `datasets.Dataset` has it."""

    def __init__(self, transform: Any = None) -> None:
        self._format_kwargs = {} if transform is None else {"transform": transform}

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> Any:
        batch: Any = {"x": [[id, id + 1]], "y": [f"row {id}"]}
        if self._format_kwargs:
            batch = self._format_kwargs["transform"](batch)
        return {name: column[0] for name, column in batch.items()}


def noisy(picture: Any) -> Any:
    return picture + random.random()


def tripled(picture: Any) -> Any:
    return picture * 3


def both(picture: Any, label: int) -> Any:
    return picture * 2 + random.random(), label + 100


def noisy_rows(batch: dict[str, Any]) -> dict[str, Any]:
    return {"z": [np.array(row) + random.random() for row in batch["x"]], "y": batch["y"]}


@pytest.mark.parametrize(
    ("dataset", "steps"),
    [
        (Separate(tripled, neg), ["OnItem(0, tripled)", "OnItem(1, _operator.neg)"]),
        (Separate(sf.Compose([tripled, noisy])), ["OnItem(0, tripled)", "OnItem(0, noisy)"]),
        (Joint(tripled, neg), ["OnItem(0, tripled)", "OnItem(1, _operator.neg)"]),
        (Joint(transforms=both), ["CallTransforms"]),
        (Named(noisy), ["OnItem(0, noisy)"]),
        (Subset(Separate(noisy), range(COUNT)), ["OnItem(0, noisy)"]),  # type: ignore[arg-type]
        (Rows(noisy_rows), ["CallTransforms"]),
    ],
)
def test_apart(dataset: Any, steps: list[str]) -> None:
    source = as_cut_source(dataset)
    assert isinstance(source, CutSource)
    names = [re.sub(r"test_known\.|<.*\.(\w+) object.*>", r"\1", repr(step)) for step in source.pipeline]
    assert names == steps
    for id in (0, 7, COUNT - 1):
        random.seed(id)
        expected = dataset[id]
        random.seed(id)
        assert same(source[id], expected)


@pytest.mark.parametrize(
    "dataset", [Later(noisy), Separate(), Own(noisy), sf.mark_deterministic(Separate(tripled)), Rows()]
)
def test_what_stays_whole(dataset: Any) -> None:
    assert type(as_cut_source(dataset)) is MapSource


def test_each_sample_is_read_once_and_augmented_anew() -> None:
    dataset = Separate(sf.Compose([tripled, noisy]), neg)
    with sf.CachedDataset(dataset, capacity="4MiB", form="prepared") as cached:
        with sf.DataLoader(cached, batch_size=4, shuffle=True) as loader:
            epochs = [{-int(n): p.numpy() for batch in loader for p, n in zip(*batch, strict=True)} for _ in range(3)]
        assert cached.stats().storage_reads == COUNT
    for id in range(COUNT):
        assert len({epoch[id].tobytes() for epoch in epochs}) == 3
        assert all((np.floor(epoch[id]) == 3 * id).all() for epoch in epochs)


@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_cache_other_transforms_are_followed(workers: int) -> None:
    data = Separate(lambda picture: picture + 1)
    with sf.DataLoader(data, 4, num_workers=workers) as loader:
        for more in (1, 10, 0):
            data.transform = partial(add, more) if more else None
            pictures = [picture for pictures, _ in loader for picture in pictures[:, 0, 0].tolist()]
            assert pictures == [id + more for id in range(COUNT)]


def default_loader(path: str) -> Any:
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


default_loader.__module__ = "torchvision.datasets.folder"


@of("torchvision.datasets.folder")
class Folder(VisionDataset):
    def __init__(self, samples: list[tuple[str, int]], loader: Any = default_loader, **settings: Any) -> None:
        super().__init__(**settings)
        self.samples, self.loader = samples, loader

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, id: int) -> Any:
        path, label = self.samples[id]
        picture = self.loader(path)
        return picture if self.transform is None else self.transform(picture), label


@pytest.fixture
def samples(image_root: Path) -> list[tuple[str, int]]:
    names = ["cat/1.JPG", "cat/2.jpg", "cat/more/0.png", "dog/a.jpg"]
    return [(str(image_root / name), number) for number, name in enumerate(names)]


def test_records_of_a_folder_are_its_files(samples: list[tuple[str, int]]) -> None:
    dataset = Folder(samples, transform=np.asarray)
    source = as_cut_source(dataset)
    assert source.fetch(1) == (Path(samples[1][0]).read_bytes(), 1)
    assert source.where(2) == samples[2][0]
    assert source.threads is True  # type: ignore[attr-defined]
    assert all(same(source[id], dataset[id]) for id in range(4))
    assert type(as_source(dataset, divide=False)) is MapSource
    assert isinstance(source.pipeline.transforms[0].transform, sf.DecodeImage)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("options", "change"), [({"num_workers": 1}, 2), ({"cache": "auto"}, 3)], ids=str)
def test_a_folder_whose_samples_change(samples: list[tuple[str, int]], options: dict[str, Any], change: int) -> None:
    dataset = Folder(samples, transform=np.size)
    with sf.DataLoader(dataset, 2, **options) as loader, warnings.catch_warnings(action="ignore"):
        for dataset.samples in (samples, samples[:2], samples * change, [*reversed(samples)]):
            for _ in range(2):
                assert same([*loader], [*torch.utils.data.DataLoader(dataset, 2)])


def test_a_folder_with_methods_of_its_own(samples: list[tuple[str, int]]) -> None:
    for name, value in (("__len__", lambda self: 2), ("__getitems__", lambda self, ids: [*map(self.__getitem__, ids)])):
        source = as_source(type("Own", (Folder,), {name: value})(samples, transform=np.asarray))
        assert type(source) is MapSource


def test_a_damaged_picture_of_a_folder_has_the_error_of_its_loader(tmp_path: Path) -> None:
    (tmp_path / "0.jpg").write_bytes(b"no picture")
    with pytest.raises(OSError, match="cannot identify image file"):
        list(sf.DataLoader(Folder([(str(tmp_path / "0.jpg"), 0)]), num_workers=1))


class Relative:
    """Reads what is below a folder that is named from the current one."""

    def __init__(self, way: str) -> None:
        self.root = {"text": "data", "path": Path("data"), "list": [f"data/{id}" for id in range(4)]}[way]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, id: int) -> int:
        return int(Path(self.root[id] if isinstance(self.root, list) else f"{self.root}/{id}").read_text())


@pytest.mark.parametrize("way", ["text", "path", "list"])
def test_another_current_directory(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as caches:
        for by in (1, 2):
            (tmp_path / f"{by}/data").mkdir(parents=True)
            monkeypatch.chdir(tmp_path / f"{by}")
            for id in range(4):
                Path(f"data/{id}").write_text(str(id * by))
            cached = caches.enter_context(sf.CachedDataset(Subset(Relative(way), range(4)), capacity="1MiB"))
            assert cached.__getitems__(range(4)) == [id * by for id in range(4)]


@pytest.mark.parametrize("backend", ["PIL", "accimage"])
def test_folders_that_are_opened_otherwise(
    samples: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(get_image_backend=lambda: backend))  # type: ignore[arg-type]
    assert isinstance(as_cut_source(Folder(samples)).fetch(0)[0], bytes) is (backend == "PIL")
    own = as_cut_source(Folder(samples, lambda path: np.asarray(Image.open(path)), transform=tripled))
    assert type(own.fetch(0)[0]) is np.ndarray
    assert len(own.pipeline) == 1
