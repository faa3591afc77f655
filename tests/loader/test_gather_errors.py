"""A batch that cannot be gathered from a cache is made sample by sample, and the reason is logged."""

from __future__ import annotations

from typing import Any

import pytest

import stallfree as sf

DATA = [[float(id)] * 8 for id in range(40)]


@pytest.mark.parametrize("broken", ["aim", "gather"])
def test_a_permanent_error_of_gathers_is_logged_once(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError(f"in {broken}")

    with sf.CachedDataset(DATA, capacity="1MiB") as data, sf.DataLoader(data, 4, num_workers=1) as loader:
        whole = list(loader)
        monkeypatch.setattr(sf.cache.SampleCache, broken, fail)
        for _ in range(3):
            for batch, before in zip(loader, whole, strict=True):
                assert [column.tolist() for column in batch] == [column.tolist() for column in before]
    [record] = caplog.records
    assert record.getMessage().startswith("a batch could not be gathered from the cache and is made sample by sample")
    assert f"ZeroDivisionError: in {broken}" in record.getMessage()
