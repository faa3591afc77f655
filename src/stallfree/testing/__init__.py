"""What tests and benchmarks of training code can use."""

from stallfree.sources.throttle import ThrottledSource

__all__ = ["ThrottledSource"]
