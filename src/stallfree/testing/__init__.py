"""Tools for tests and benchmarks: slow sources, and a test suite for tiers."""

from typing import TYPE_CHECKING

from stallfree.testing.throttle import ThrottledSource

if TYPE_CHECKING:
    from stallfree.testing.tier_contract import TierContract

__all__ = ["ThrottledSource", "TierContract"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name != "TierContract":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import pytest  # installed only where tiers are tested

        pytest.register_assert_rewrite(f"{__name__}.tier_contract")
        from stallfree.testing.tier_contract import TierContract

        return TierContract
