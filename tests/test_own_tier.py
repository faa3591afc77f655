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

EXAMPLES = str(Path(__file__).parents[1] / "examples")


class TestOwnTier(sf.testing.TierContract):
    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Of the module of the example, which spawned processes can import too."""
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setenv("PYTHONPATH", EXAMPLES)
        yield importlib.import_module("own_tier").CompressedFiles(tmp_path / "files")
        sys.modules.pop("own_tier")


class TestDiskTier(sf.testing.TierContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> sf.DiskTier:
        return sf.DiskTier(tmp_path / "disk", capacity="1MiB")


@needs_server
class TestRedisStore(sf.testing.TierContract):
    @pytest.fixture
    def store(self) -> Iterator[sf.RedisStore]:
        with sf.RedisStore(capacity_per_node="16MiB", name=f"contract-{os.getpid()}", timeout=60.0) as store:
            yield store
