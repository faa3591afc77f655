"""The job that tests of packages use."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from package_job import Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with closing(Job(tmp_path)) as made:
        yield made
