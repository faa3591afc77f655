"""Data sets, transforms and writers of other libraries themselves, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from loader_data import same
from optional_library import library
from stallfree.sources import TarDataset, as_source


def test_shards_of_webdataset(tmp_path: Path) -> None:
    """What the peer writes and reads, sample by sample."""
    webdataset = library("webdataset")
    generator = np.random.default_rng(0)
    with webdataset.ShardWriter(f"{tmp_path}/s-%03d.tar", maxcount=7, verbose=0) as writer:
        for number in range(25):
            sample = {
                "jpg": generator.bytes(int(generator.integers(0, 3000))),
                "cls": number,
                "meta.json": {"n": number},
            }
            more = {"More.TXT": "text"} if number % 3 == 0 else {}
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


STREAMS = {
    "plain": (lambda stream: stream, 20),
    "mapped": (lambda stream: stream.map(lambda row: {"x": row["x"] * 2}), 20),
    "part": (lambda stream: stream.skip(2).take(8), 8),
    "shuffled": (lambda stream: stream.shuffle(seed=1, buffer_size=5), None),
    "part of a shuffled one": (lambda stream: stream.shuffle(seed=1).take(8), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_streams_of_hugging_face(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their epochs have other orders of the shards. What is shuffled may also have other samples, and is not cached."""
    datasets = library("datasets")
    monkeypatch.setattr(library("tqdm").tqdm, "monitor_interval", 0)  # no thread of its own
    change, kept = STREAMS[name]
    stream = change(datasets.Dataset.from_dict({"x": list(range(20))}).to_iterable_dataset(num_shards=4))
    expected = torch.utils.data.DataLoader(stream.with_format("torch"), 4, num_workers=2)
    with sf.DataLoader(stream.with_format("torch"), 4, num_workers=2, cache="auto", capacity="4MiB") as loader:
        assert [batch["x"].tolist() for batch in loader] == [batch["x"].tolist() for batch in expected]
        assert ("is cached" in loader.decision) == (kept is not None)
        orders = []
        for epoch in (1, 2):
            stream.set_epoch(epoch)
            orders.append([row for batch in loader for row in batch["x"].tolist()])
        if kept is not None:
            assert len(orders[0]) == len(set(orders[0])) == kept
            assert sorted(orders[0]) == sorted(orders[1])


@pytest.mark.slow
def test_dictionaries_of_monai(tmp_path: Path) -> None:
    """Volumes are loaded once; flips are fresh in each epoch, of picture and label alike."""
    transforms = library("monai.transforms")
    samples = []
    for number in range(6):
        volume = np.random.default_rng(number).random((4, 5, 6), np.float32)
        samples.append({name: str(tmp_path / f"{name}{number}.npy") for name in ("image", "label")})
        for path in samples[-1].values():
            np.save(path, volume)
    keys = ["image", "label"]
    chain = transforms.Compose(
        [
            transforms.LoadImaged(keys, reader="NumpyReader"),
            transforms.EnsureChannelFirstd(keys, channel_dim="no_channel"),
            transforms.RandFlipd(keys, prob=0.5, spatial_axis=0),
        ]
    )
    with (
        sf.CachedDataset(samples, capacity="4MiB", form="prepared", transform=chain) as cached,
        sf.DataLoader(cached, batch_size=6) as loader,
    ):
        epochs = [next(iter(loader)) for _ in range(4)]
        for path in tmp_path.glob("*.npy"):
            path.unlink()  # all is in memory
        epochs += list(loader)
    for batch in epochs:
        assert batch["image"].shape == (6, 1, 4, 5, 6)
        assert torch.equal(torch.as_tensor(batch["image"]), torch.as_tensor(batch["label"]))
    assert len({torch.as_tensor(batch["image"]).numpy().tobytes() for batch in epochs}) > 1
