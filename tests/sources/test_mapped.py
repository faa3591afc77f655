"""Other people's data sets as sources."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import stallfree as sf
from stallfree.errors import InputError
from stallfree.pipeline.compose import Source
from stallfree.sources.files import ImageFolder
from stallfree.sources.mapped import MapSource, as_source
from stallfree.testing.throttle import ThrottledSource


class Bare:
    """Has only `__getitem__`."""

    def __getitem__(self, id: int) -> int:
        assert id >= 0, "ids are normalised before they come here"
        if id == 3:
            raise KeyError("three is broken")
        return id * id


class Squares(Bare, Dataset[int]):
    def __init__(self, count: int = 5) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_data_set_becomes_a_source() -> None:
    source = as_source(Squares())
    assert isinstance(source, MapSource)
    assert isinstance(source, Source)
    assert source.threads is False
    assert len(source) == 5
    assert len(source.pipeline) == 0
    assert source.fetch(2) == source[2] == 4
    assert source[-1] == source[np.int32(4)] == 16
    assert source.where(0) == ""
    assert as_source(source) is source
    assert pickle.loads(pickle.dumps(source))[2] == 4
    assert source.fingerprint() == as_source(Squares()).fingerprint() != as_source(Squares(6)).fingerprint()
    with pytest.raises(KeyError, match=r"'three is broken'\n.*fetching sample 3"):
        source[-2]


@pytest.mark.parametrize("dataset", [[1, 2, 3], (1, 2, 3), np.arange(1, 4), TensorDataset(torch.tensor([1, 2, 3]))])
def test_all_that_can_be_indexed(dataset: Any) -> None:
    assert [int(np.ravel(sample)[0]) for sample in as_source(dataset)] == [1, 2, 3]  # type: ignore[attr-defined]


def test_a_subset_of_a_source_keeps_fetch_and_prep_apart(image_root: Path) -> None:
    folder = ImageFolder(image_root)
    (image_root / "dog/a.jpg").write_text("no picture")
    (image_root / "dog/b.jpeg").unlink()
    subset = as_source(Subset(Subset(folder, [0, 4, 3, 2]), torch.tensor([1, 2, -1])))
    assert isinstance(subset, Source)
    assert len(subset) == 3
    assert subset.pipeline is folder.pipeline
    assert subset.fetch(2) == folder.fetch(2)
    assert subset.where(-1) == folder.where(2)
    for id, place, doing in ((0, 4, "fetching"), (1, 3, "preparing")):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            subset[id]
        assert caught.value.__notes__ == [f"stallfree: {doing} sample {id} ({folder.where(place)})"]
    prints = {as_source(Subset(folder, indices)).fingerprint() for indices in ([0], [1], [0, 1])}
    assert len(prints | {folder.fingerprint()}) == 4


def test_other_subsets_are_data_sets(image_root: Path) -> None:
    class Special(Subset[Any]):
        def __getitem__(self, id: Any) -> Any:
            return "special"

        def __getitems__(self, ids: list[int]) -> list[Any]:
            return [self[id] for id in ids]

    assert as_source(Special(ImageFolder(image_root), [1]))[0] == "special"  # type: ignore[arg-type]
    assert as_source(Subset(Squares(), [4, 2]))[0] == 16
    with pytest.raises(InputError, match="length 0"):
        as_source(Subset(ImageFolder(image_root), []))  # type: ignore[arg-type]


@pytest.mark.parametrize(("dataset", "message"), [
    (Stream(), "IterableDataset.*list"), (Bare(), "Bare has no __len__: give a map-style"),
    ({1, 2}, "set has no __getitem__"), (Squares, "Squares is a class"), ([], "list has length 0"),
    (Squares(0), "Squares has length 0"),
])  # fmt: skip
def test_what_is_no_data_set(dataset: Any, message: str) -> None:
    for make in (as_source, ThrottledSource):
        with pytest.raises(InputError, match=message):
            make(dataset)


class Anything(Squares):
    """Has whatever attribute it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def test_a_data_set_with_any_attribute_is_no_source() -> None:
    with sf.DataLoader(Anything(3), batch_size=3) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 4]]
