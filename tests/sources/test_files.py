"""Files as samples: where they may lie, what may go wrong, and what it costs to keep their paths."""

import io
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader_data import same
from stallfree.errors import InputError
from stallfree.ipc.process import call_in_child
from stallfree.pipeline.compose import Compose, Source
from stallfree.sources import paths
from stallfree.sources.files import FileDataset

LABELS = [10, 11, 12, 13, 14]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.bin" for number in range(5)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * number)
    return paths


@pytest.fixture
def dataset(files: list[Path]) -> FileDataset:
    return FileDataset(files, LABELS)


def twice(data: bytes) -> bytes:
    return data * 2


def test_fetch_reads_and_pipeline_prepares(files: list[Path]) -> None:
    dataset = FileDataset([files[2], str(files[3])], [0, 1], Compose([twice, len]), decode=bytes.hex)
    assert isinstance(dataset, Source)
    assert len(dataset) == 2
    assert dataset.fetch(0) == (b"\2\2", 0)
    assert len(dataset.pipeline) == 3
    assert dataset[0] == dataset.pipeline(dataset.fetch(0)) == (8, 0)
    assert list(dataset) == [(8, 0), (12, 1)]
    assert FileDataset(files[2:3], transform=twice)[0] == b"\2\2\2\2"  # without labels it is no tuple


def test_ids_as_lists_have_them(dataset: FileDataset) -> None:
    for id in (-1, 4, np.int64(-1), np.uint8(4), torch.tensor(4)):
        assert dataset[id] == (b"\4" * 4, 14)
        assert dataset.fetch(id) == (b"\4" * 4, 14)
        assert dataset.where(id).endswith("4.bin")
    for id in (5, -6, 10**20):
        for ask in (dataset.__getitem__, dataset.fetch, dataset.where):
            with pytest.raises(IndexError, match="5 samples"):
                ask(id)
    with pytest.raises(TypeError):
        dataset[1.0]  # type: ignore[index]


def test_relative_paths_stay_where_they_were(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files[0].parent)
    dataset = FileDataset(["3.bin", "./4.bin", f"file://{files[2]}"])
    monkeypatch.chdir("/")
    assert [len(data) for data in dataset] == [3, 4, 2]
    assert dataset.where(1) == str(files[4])


def test_odd_names(tmp_path: Path) -> None:
    names = ["a b.bin", "ü€.bin", "x::y.bin", os.fsdecode(b"\xff\xfe.bin"), "new\nline"]
    for name in names:
        (tmp_path / name).write_bytes(os.fsencode(name))
    assert [os.fsdecode(data) for data in FileDataset([tmp_path / name for name in names])] == names


def test_http_in_threads_and_after_a_fork(files: list[Path], serve: Callable[[Path], str]) -> None:
    pytest.importorskip("aiohttp")
    url = serve(files[0].parent)
    dataset = FileDataset([f"{url}/{number}.bin" for number in range(5)] + [f"{url}/missing"])
    expected = [bytes([number]) * number for number in range(5)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(dataset.fetch, list(range(5)) * 4)) == expected * 4
    with pytest.raises(FileNotFoundError, match=f"sample 5 .*{url}/missing"):
        dataset[5]
    # the parent's event loop lives in a thread that the child lacks
    assert call_in_child(partial(dataset.fetch, 4), "the fetch") == expected[4]


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            FileDataset([path]).fetch(0)


@pytest.mark.parametrize(("paths", "labels", "message"), [
    (["a"], [], "0 labels for 1 paths"), ("a.jpg", None, "no list of paths"), ([b"a.jpg"], None, "bytes"),
])  # fmt: skip
def test_bad_arguments(paths: Any, labels: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FileDataset(paths, labels)


def test_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sizes = tmp_path / "file", [1024, 400]
    path.write_bytes(bytes(range(256)) * 4)

    class Short(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            os.truncate(path, sizes[0])
            return super().read(min(size or 0, 100))

    monkeypatch.setattr(paths.io, "FileIO", Short)
    assert FileDataset([path]).fetch(0) == bytes(range(256)) * 4
    sizes.pop(0)
    with pytest.raises(OSError, match=r"file' ended 624 bytes early"):
        FileDataset([path]).fetch(0)


@pytest.mark.parametrize("labels", [
    [1, 2, 3], [0.5, 1.5, 2.5], [1, 2.5, None], [True, False, True], [2**80, 0, 1], [2**63, -1, 0],
    ["cat", "dog", "cow"], ({"box": 1}, {"box": 2}, {"box": 3}), np.array([1, 2, 3], np.int16),
    torch.tensor([1.0, 2.0, 3.0]), np.zeros((3, 2)), torch.zeros(3, 2),
], ids=repr)  # fmt: skip
def test_labels_come_out_as_they_went_in(files: list[Path], labels: Any) -> None:
    dataset = FileDataset(files[:3], labels)
    for id in range(3):
        assert same(dataset.fetch(id)[1], labels[id])
    if np.ndim(labels) == 2:  # a change in place affects no other sample
        dataset.fetch(1)[1][:] = 7
        assert dataset.fetch(1)[1].tolist() == [0, 0]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=20))
def test_path_list_is_a_list(texts: list[str]) -> None:
    kept = paths.PathList(texts)
    assert list(kept) == texts
    assert [kept[-1 - i] for i in range(len(texts))] == texts[::-1]
    assert list(pickle.loads(pickle.dumps(kept))) == texts


def test_paths_take_few_bytes_and_few_objects(tmp_path: Path) -> None:
    count = 20_000
    dataset = FileDataset([f"{tmp_path}/class/{number:08d}.jpg" for number in range(count)], list(range(count)))
    sent = pickle.dumps(dataset)
    assert len(sent) < 32 * count
    assert pickle.loads(sent).where(17_777) == f"{tmp_path}/class/00017777.jpg"


def test_fingerprint_changes_with_the_data(dataset: FileDataset, files: list[Path]) -> None:
    prints = {dataset.fingerprint(), FileDataset(files, LABELS, twice).fingerprint()}
    assert len(prints) == 1
    for data in (files, LABELS[::-1]), (files[::-1], LABELS), (files, None), (files[:4], LABELS[:4]):
        prints.add(FileDataset(*data).fingerprint())
    for change in (lambda: files[2].write_bytes(b"another size"), files[2].unlink):
        change()
        prints.add(dataset.fingerprint())
    assert len(prints) == 7
