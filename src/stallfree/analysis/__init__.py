"""Analysis of data stalls: measurement, throughput model, simulation, and replay of eviction policies."""

from stallfree.analysis.analyzer import analyze
from stallfree.analysis.prediction import Prediction
from stallfree.analysis.replay import EpochReplay, Replay, replay
from stallfree.analysis.report import Report

__all__ = ["EpochReplay", "Prediction", "Replay", "Report", "analyze", "replay"]
