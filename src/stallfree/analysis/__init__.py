"""Where training waits, and what would change that: so far, policies over recorded traces."""

from stallfree.analysis.replay import EpochReplay, Replay, replay

__all__ = ["EpochReplay", "Replay", "replay"]
