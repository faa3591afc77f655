"""Tracebacks show the user's code, and not this package's."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stallfree as sf
from loader_data import Made

LOADERS: dict[str, Callable[[Any, int], Any]] = {
    "plain": lambda data, workers: sf.DataLoader(data, 4, num_workers=workers),
    "auto": lambda data, workers: sf.DataLoader(data, 4, num_workers=workers, cache="auto"),
    "cached": lambda data, workers: sf.DataLoader(sf.CachedDataset(data, capacity="1MiB"), 4, num_workers=workers),
    "prefetched": lambda data, workers: sf.DataLoader(data, 4, num_workers=workers, device="cpu"),
    "shared": lambda data, workers: sf.SharedLoader(data, group="tracebacks", batch_size=4, num_workers=workers or 1),
}
OURS = f'File "{Path(sf.__file__).parent}'


def _read(id: int) -> int:
    try:
        return {"id": id}["name" if id == 5 else "id"]
    except KeyError as error:
        raise FileNotFoundError(2, "no such file", f"{id}.jpg") from error


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("loader", LOADERS)
def test_an_error_of_the_data_set_shows_its_code_and_its_cause(loader: str, workers: int) -> None:
    with LOADERS[loader](Made(8, _read), workers) as made, pytest.raises(FileNotFoundError, match=r"5\.jpg") as caught:
        list(made)
    assert isinstance(caught.value.__cause__, KeyError)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count(", in _read") == 2
    assert "sample 5" in text
    assert OURS not in text
    assert len(text.splitlines()) < 40


def test_an_error_of_this_package_itself_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise AttributeError("a fault of stallfree")

    monkeypatch.setattr("stallfree.loader.run.Progress.hand_out", broken)
    with pytest.raises(AttributeError) as caught:
        list(sf.DataLoader([1, 2, 3]))
    assert "".join(traceback.format_exception(caught.value)).count(OURS) >= 2
