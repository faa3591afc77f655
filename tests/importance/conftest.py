"""The job that tests of packages use."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from package_job import Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()
