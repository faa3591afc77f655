"""Observation of running training: scripts from outside, metrics for other tools."""
