"""Data sets, transforms and writers of other libraries themselves, where they are installed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from loader_data import same
from optional_library import library
from stallfree.sources.mapped import as_source
from stallfree.sources.tar import TarDataset


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
