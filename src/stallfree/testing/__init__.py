"""Tools for tests and benchmarks: slow sources, and a test suite for caches."""

from typing import TYPE_CHECKING

from stallfree.sources.throttle import ThrottledSource

if TYPE_CHECKING:
    from stallfree.testing.cache_contract import CacheContract

__all__ = ["CacheContract", "ThrottledSource"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name != "CacheContract":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import pytest  # installed only where caches are tested

        pytest.register_assert_rewrite(f"{__name__}.cache_contract")
        from stallfree.testing.cache_contract import CacheContract

        return CacheContract
