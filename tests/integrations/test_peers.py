"""Data sets, transforms, writers and `tv_tensors` of other libraries themselves, where they are installed."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import stallfree as sf
from loader_data import Made, same
from optional_library import library
from stallfree.sources.mapped import as_source
from stallfree.sources.tar import TarDataset

pytestmark = pytest.mark.libraries
SIZE = 8


def test_shards_of_webdataset(tmp_path: Path) -> None:
    """What the peer writes and reads, sample by sample."""
    webdataset = library("webdataset")
    generator = np.random.default_rng(0)
    with webdataset.ShardWriter(f"{tmp_path}/s-%03d.tar", maxcount=7, verbose=0) as writer:
        for number in range(25):
            sample = {"jpg": generator.bytes(int(generator.integers(0, 3000))), "cls": number}
            more = {"More.TXT": "text", "meta.json": {"n": number}} if number % 3 == 0 else {}
            writer.write({"__key__": f"part/{number:06}", **sample, **more})
    shards = sorted(map(str, tmp_path.glob("*.tar")))
    theirs = list(webdataset.WebDataset(shards, shardshuffle=False))
    ours = TarDataset(f"{tmp_path}/s-{{000..{len(shards) - 1:03}}}.tar", index=tmp_path)
    assert len(shards) > 2
    assert len(ours) == len(theirs) == 25
    for mine, sample in zip(ours, theirs, strict=True):
        assert mine == {key: value for key, value in sample.items() if key not in ("__url__", "__local_path__")}


@pytest.mark.slow
def test_datasets_of_hugging_face() -> None:
    datasets = library("datasets")
    rows = {"x": [[number, number + 1] for number in range(20)], "text": [f"row {number}" for number in range(20)]}
    plain = datasets.Dataset.from_dict(rows)

    def noisy(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "x": [np.array(row) + np.random.normal() for row in batch["x"]]}

    with sf.CachedDataset(plain, capacity="4MiB") as cached:
        assert [cached[id] for id in range(20)] == list(plain)
    dataset = plain.with_transform(noisy)
    source = as_source(dataset)
    assert source.fetch(4) == plain[4]
    np.random.seed(1)
    expected = dataset[4]
    np.random.seed(1)
    assert same(source[4], expected)
    with sf.CachedDataset(dataset, capacity="4MiB") as cached, sf.DataLoader(cached, batch_size=20) as loader:
        first, second = (next(iter(loader))["x"] for _ in range(2))
        assert not torch.equal(first, second)
        assert torch.allclose(first[:, 1] - first[:, 0], torch.ones(20, dtype=first.dtype))
        assert cached.stats().storage_reads == 20


def rows_of(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"x": 5 * shard + number} for number in range(5))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_streams_of_hugging_face(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They give torch's batches, and resume: in this process by their own state."""
    datasets = library("datasets")
    monkeypatch.setattr(library("tqdm").tqdm, "monitor_interval", 0)  # no thread of its own
    plain = datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"shards": list(range(4))})
    stream = plain.map(lambda row: {"x": row["x"] * 2}).with_format("torch")
    expected = [batch["x"].tolist() for batch in torch.utils.data.DataLoader(stream, 4, num_workers=workers)]
    with sf.DataLoader(stream, 4, num_workers=workers) as loader:
        first = [next(batches)["x"].tolist() for batches in [iter(loader)] for _ in range(2)]
        loader.load_state_dict(loader.state_dict())
        assert first + [batch["x"].tolist() for batch in loader] == expected


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Eight pictures of two classes."""
    for number in range(8):
        path = tmp_path / "pictures" / ("ab"[number % 2]) / f"{number}.{'png' if number < 2 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (20, 30, 3), np.uint8)).save(path)
    return tmp_path / "pictures"


def classic(v1: Any) -> Any:
    crop = [v1.Resize((12, 12)), v1.RandomResizedCrop(SIZE, scale=(0.3, 1.0)), v1.RandomHorizontalFlip()]
    return v1.Compose([*crop, v1.ColorJitter(0.4, 0.4, 0.4), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.25] * 3)])


def current(v2: Any) -> Any:
    """Its first step makes a `tv_tensors.Image`, its last a plain tensor."""
    crop = [v2.Resize((12, 12)), v2.RandomResizedCrop(SIZE, scale=(0.3, 1.0)), v2.RandomHorizontalFlip()]
    return v2.Compose([v2.ToImage(), *crop, v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()])


@pytest.mark.parametrize(("module", "make", "steady"), [("transforms", classic, 1), ("transforms.v2", current, 2)])
def test_an_image_folder(pictures: Path, module: str, make: Any, steady: int) -> None:
    """Samples are its own; those of the steps before the first random one are cached; crops are fresh in each epoch."""
    datasets = library("torchvision.datasets")
    assert library("torchvision").get_image_backend() == "PIL"
    dataset = datasets.ImageFolder(pictures, make(library(f"torchvision.{module}")), target_transform=lambda n: n + 10)
    source = as_source(dataset)
    assert isinstance(source, sf.FileDataset)
    assert source.fetch(0) == (Path(dataset.samples[0][0]).read_bytes(), 0)
    for id in range(8):
        torch.manual_seed(id)
        expected = dataset[id]
        torch.manual_seed(id)
        assert same(source[id], expected)
    with sf.CachedDataset(dataset, capacity="4MiB", form="prepared") as cached:
        split = sf.split(cached.steps, probe=source.fetch(0))
        assert len(split.deterministic) == 1 + steady  # decoding, and those of the transform
        with sf.DataLoader(cached, batch_size=8, num_workers=2) as loader:
            epochs = [next(iter(loader)) for _ in range(3)]
        assert cached.stats().storage_reads == 8
    for images, labels in epochs:
        assert type(images) is torch.Tensor
        assert images.shape == (8, 3, SIZE, SIZE)
        assert labels.tolist() == [label + 10 for label in dataset.targets]
    assert not all(torch.equal(images, epochs[0][0]) for images, _ in epochs[1:])


def detection(kinds: Any, id: int) -> Any:
    """A dark image with one bright rectangle, its box and its mask."""
    left, top = 2 * id, id
    image = torch.zeros(3, 60, 80, dtype=torch.uint8)
    image[:, top : top + 40, left : left + 50] = 200
    box = kinds.BoundingBoxes(torch.tensor([[left, top, left + 50, top + 40]]), format="XYXY", canvas_size=(60, 80))
    return kinds.Image(image), {"boxes": box, "masks": kinds.Mask(image[:1] > 0), "labels": torch.tensor([id])}


@pytest.mark.parametrize("form", ["fetched", "prepared"])
def test_boxes_and_masks_are_cropped_with_their_image(form: Any) -> None:
    """`tv_tensors` stay what they are in the cache and in workers: a transform moves them all by the same draw."""
    kinds, v2 = library("torchvision.tv_tensors"), library("torchvision.transforms.v2")
    crop = v2.RandomResizedCrop(32, scale=(0.3, 0.9), antialias=True)
    steps = v2.Compose([v2.Resize((120, 160)), crop, v2.RandomHorizontalFlip(), v2.ClampBoundingBoxes()])
    with (
        sf.CachedDataset(Made(8, partial(detection, kinds)), capacity="8MiB", form=form, transform=steps) as cached,
        sf.DataLoader(cached, batch_size=4, num_workers=2, collate_fn=list) as loader,
    ):
        epochs = [[sample for batch in loader for sample in batch] for _ in range(3)]
        assert cached.stats().storage_reads == 8
    for samples in epochs:
        assert [found["labels"].item() for _, found in samples] == list(range(8))
        for image, found in samples:
            assert type(image) is kinds.Image
            assert type(found["boxes"]) is kinds.BoundingBoxes
            assert type(found["masks"]) is kinds.Mask
            assert tuple(found["boxes"].canvas_size) == tuple(image.shape[-2:]) == (32, 32)
            _, rows, columns = found["masks"].nonzero(as_tuple=True)
            area = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert found["boxes"][0].tolist() == pytest.approx([int(edge) for edge in area], abs=1)
            assert np.mean((image[0] > 100).numpy() != found["masks"][0].numpy()) < 0.1
    boxes = [[found["boxes"].tolist() for _, found in samples] for samples in epochs]
    assert boxes[0] != boxes[1] != boxes[2]
