"""Observation of running training: scripts from outside, metrics for other tools."""

from stallfree.observe.metrics import Hook, Metrics, PrometheusCollector, PrometheusServer, TensorBoardHook

__all__ = ["Hook", "Metrics", "PrometheusCollector", "PrometheusServer", "TensorBoardHook"]
