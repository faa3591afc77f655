"""Data sets as users of public libraries write them: with `form="files"` they give the batches of torch's loader."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from benchmarks.programs import files
from benchmarks.volumes import make_volumes

import stallfree as sf
from torch_batches import digest, torch_epochs

pytestmark = [pytest.mark.libraries, pytest.mark.slow]  # test_files_form.py has each way to open a file
EPOCHS, SAMPLES, SEED = 3, 8, 5
PROGRAMS = (
    *("monai_dictionaries", "nibabel_slices", "numpy_archives"),
    *("opencv_albumentations", "polygon_masks", "saved_tensors"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("programs") / "data"
    files.small_photos(root, SAMPLES)
    files.annotate(root)
    files.features(root, SAMPLES)
    files.clips(root, SAMPLES)
    make_volumes(root / "volumes", None, SAMPLES)
    return root


@pytest.mark.parametrize("name", PROGRAMS)
def test_batches_are_torchs_and_storage_is_read_in_the_first_epoch(root: Path, name: str) -> None:
    program: Any = importlib.import_module(f"benchmarks.programs.{name}")
    options = program.OPTIONS | {"batch_size": 3, "num_workers": 1}
    expected = list(torch_epochs(program.make(str(root)), EPOCHS, seed=SEED, **options))
    with (
        sf.CachedDataset(program.make(str(root)), capacity="16MiB", form="files") as data,
        sf.DataLoader(data, shuffle=True, seed=SEED, **options) as loader,
    ):
        found = [list(map(digest, loader))]
        read = data.stats().storage_reads
        found += [list(map(digest, loader)) for _ in range(EPOCHS - 1)]
        assert data.stats().storage_reads == read >= SAMPLES
    assert found == expected
    assert not set(found[0]) & set(found[1])
