"""What reads past `open`: its name, and how much it is."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from stallfree.sources.reads.unseen import bytes_read, mapped_files, native_library


class _Plain:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, id: int) -> Any:
        return torch.zeros(3), id


class _Imports(_Plain):
    def __getitem__(self, id: int) -> Any:
        import h5py  # type: ignore[import-not-found]

        return h5py.File(f"{id}.h5")


def _read(path: str) -> Any:
    import SimpleITK  # type: ignore[import-not-found]

    return SimpleITK.ReadImage(path)


class _Calls(_Plain):
    def __getitem__(self, id: int) -> Any:
        return _read(f"{id}.nii")


class _Holds(_Plain):
    def __init__(self, held: Any) -> None:
        self.held = held


class _Both(_Imports):
    def show(self) -> Any:
        return cv2


@pytest.mark.parametrize(
    ("dataset", "library", "cure"),
    [
        (_Plain(), "a library", "its call for data in memory"),
        (_Imports(), "h5py", "h5py.File(open(path, 'rb'), 'r')"),
        (_Calls(), "SimpleITK", "nibabel or pydicom"),
        (Subset(_Imports(), [1]), "h5py", "h5py.File"),  # type: ignore[arg-type]
        (ConcatDataset([_Plain(), _Calls()]), "SimpleITK", "nibabel"),  # type: ignore[list-item]
        (_Holds(_read), "SimpleITK", "nibabel"),
        (_Holds(functools.partial(_read, "a.nii")), "SimpleITK", "nibabel"),
        (_Holds({"read": [cv2.imread]}), "cv2", "cv2.imdecode"),
        (_Holds(SimpleNamespace(__module__="lmdb.cffi")), "lmdb", "form='fetched'"),
        (_Both(), "h5py", "h5py.File"),
    ],
)
def test_the_library_that_a_data_set_uses(dataset: Any, library: str, cure: str) -> None:
    found = native_library(dataset)
    assert found[0] == library
    assert cure in found[1]


@pytest.mark.skipif(bytes_read() is None, reason="the kernel does not count reads")
def test_bytes_that_a_thread_reads(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(50_000))
    before = bytes_read()
    file = os.open(tmp_path / "file", os.O_RDONLY)
    os.read(file, 40_000)
    os.close(file)
    after = bytes_read()
    assert before is not None
    assert after is not None
    assert 40_000 <= after - before < 41_000
    assert mapped_files() == []
