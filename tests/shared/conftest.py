"""The group that the tests of a module share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from group_jobs import Group


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path)
    with made.opened:
        yield made
