"""The simulated device, for the tests of a folder."""

from collections.abc import Iterator

import pytest
from fakes import World


@pytest.fixture
def device() -> Iterator[World]:
    """A simulated device that every prefetcher of the test uses."""
    made = World()
    with made.installed():
        yield made
    made.check()


@pytest.fixture(params=["host", "device"])
def world(request: pytest.FixtureRequest) -> World | None:
    """A simulated device, or None: the prefetchers of a CPU."""
    return None if request.param == "host" else request.getfixturevalue("device")
