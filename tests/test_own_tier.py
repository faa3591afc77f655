"""The example of a tier of one's own passes the contract, and so does `DiskTier`."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stallfree as sf
from redis_servers import needs_server

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_tier.py"


@pytest.fixture
def own_tier(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the example, which spawned processes can import too."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE.parent))
    yield importlib.import_module("own_tier")
    sys.modules.pop("own_tier")


class TestOwnTier(sf.testing.TierContract):
    @pytest.fixture
    def store(self, tmp_path: Path, own_tier: Any) -> Any:
        return own_tier.CompressedFiles(tmp_path / "files")


class TestDiskTier(sf.testing.TierContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> sf.DiskTier:
        return sf.DiskTier(tmp_path / "disk", capacity="1MiB")


@needs_server
class TestRedisStore(sf.testing.TierContract):
    @pytest.fixture
    def store(self) -> Iterator[sf.RedisStore]:
        with sf.RedisStore(capacity_per_node="16MiB", name=f"contract-{os.getpid()}") as store:
            yield store
