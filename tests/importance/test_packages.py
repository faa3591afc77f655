"""Packages: what goes in comes out, whatever happens to the file, within the budget; and the flags are shared."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_tools import crc, is_signed, signed
from stallfree.importance.packages import Packages, SharedFlags
from stallfree.pipeline.codec import encode

NUM_IDS = 1000
PLENTY = 1 << 40


class Some(Packages):
    """Packages that take values, and whose counts are at hand."""

    def __init__(self, folder: Path, *, allow_pickle: bool = False, write_budget: int = PLENTY) -> None:
        self.shared = SharedFlags(NUM_IDS)
        self.allow_pickle = allow_pickle
        super().__init__(folder, self.shared, allow_pickle=allow_pickle, write_budget=write_budget)

    def put(self, ids: Any, values: list[Any]) -> bool:
        return self.add(list(ids), [encode(value, allow_pickle=self.allow_pickle) for value in values])

    def all_of(self, number: int) -> dict[int, Any]:
        ids, values = self.read(number, lambda ids: np.ones(len(ids), bool))
        return dict(zip(ids.tolist(), values, strict=True))

    def count(self, name: str) -> int:
        return self.shared.stats()[name]

    def file_size(self) -> int:
        return os.fstat(self._file.fileno()).st_size


# -- round trips -------------------------------------------------------------------------------------------------------

arrays = (np.arange(12.0).reshape(3, 4), torch.arange(10).view(2, 5), torch.zeros(0), np.float32(2))
values = st.sampled_from([None, 3.5, "text", (1, "a", None), {"a": [1, 2.0]}, *arrays]) | st.binary(max_size=3000)
quick = settings(max_examples=15, suppress_health_check=list(HealthCheck))


@quick
@given(
    st.lists(st.lists(st.tuples(st.integers(0, NUM_IDS - 1), values), min_size=1, max_size=8), min_size=1, max_size=4)
)
def test_what_goes_in_comes_out(tmp_path_factory: pytest.TempPathFactory, contents: list[Any]) -> None:
    some = Some(tmp_path_factory.mktemp("packages"))
    newest: dict[int, int] = {}
    for content in contents:
        newest.update({id: len(some.sizes) for id, _ in content})
        assert some.put([id for id, _ in content], [value for _, value in content])
    assert some.holding(range(NUM_IDS)).tolist() == [newest.get(id, -1) for id in range(NUM_IDS)]
    assert some.sizes.tolist() == [len(content) for content in contents]
    for number, content in enumerate(contents):
        for _ in range(2):  # the first time they are changed
            ids, found = some.read(number, lambda ids: np.ones(len(ids), bool))
            assert ids.tolist() == [id for id, _ in content]
            assert [type(value) for value in found] == [type(value) for _, value in content]
            assert list(map(crc, found)) == [crc(value) for _, value in content]
            for value in found:
                if isinstance(value, torch.Tensor) and value.numel():
                    value.zero_()
    assert some.count("packages_read") == 2 * len(contents)
    assert some.count("package_bytes_read") == 2 * some.file_size()
    assert some.count("packages_dropped") == 0
    assert some.count("packages_written") == len(contents)
    assert some.count("samples_packed") == sum(map(len, contents))
    assert some.count("package_bytes_written") == some.file_size()
    some.close()


def test_more_than_one_call_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel moves 2 GiB at most in one call; here it moves 1,000 bytes."""

    def limited(call: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, into, at: call(fd, [into[0][:1000]], at)

    monkeypatch.setattr(os, "preadv", limited(os.preadv))
    monkeypatch.setattr(os, "pwritev", limited(os.pwritev))
    some = Some(tmp_path)
    assert some.put(range(9), [signed(id, 7, 500) for id in range(9)])
    assert some.count("package_bytes_written") == some.file_size() > 4000
    assert all(is_signed(id, value) for id, value in some.all_of(0).items())


# -- damage ------------------------------------------------------------------------------------------------------------


def test_flipped_bytes_are_noticed(tmp_path: Path) -> None:
    """A damaged package is forgotten and counted; no sample of it is read; another one takes its place."""
    some, fd = Some(tmp_path), None
    assert some.put([5, 6], [1, 2])
    for at in range(0, 180, 2):
        start = some.file_size()
        assert some.put([3, 999], [22, 6994])
        size, fd = some.file_size() - start, some._file.fileno()
        before = os.pread(fd, 1, start + at % size)
        os.pwrite(fd, bytes([before[0] ^ 1 << at % 8]), start + at % size)
        assert some.all_of(int(some.holding([3])[0])) == {}
        assert some.holding([3, 999]).tolist() == [-1, -1]
    assert some.count("packages_dropped") == 90
    os.ftruncate(fd, some.file_size() - 1)
    assert some.put([3, 999], [22, 6994])
    assert some.all_of(int(some.holding([3])[0])) == {3: 22, 999: 6994}
    assert some.all_of(0) == {5: 1, 6: 2}
    os.ftruncate(fd, some.file_size() - 1)
    assert some.all_of(int(some.holding([3])[0])) == {}


# -- budget and full disks ---------------------------------------------------------------------------------------------


def test_the_budget_is_exact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As many bytes as were allowed, and whatever still fits is written."""
    first = Some(tmp_path)
    assert first.put([1], [signed(1, 7, 1000)])
    size = first.file_size()
    for more, stored in ((-1, 1), (0, 2), (1, 2)):
        some = Some(tmp_path, write_budget=2 * size + more)
        taken = [some.put([id], [signed(id, 7, length)]) for id, length in ((1, 1000), (2, 1000), (3, 1000), (4, 9))]
        assert taken == [True, stored == 2, False, stored == 1]
        assert some.file_size() == some.count("package_bytes_written")
    assert caplog.text.count("is spent") == len(caplog.records) == 3, "once each"


# -- flags -------------------------------------------------------------------------------------------------------------
