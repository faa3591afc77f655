"""Watching training that runs: scripts from outside, metrics for other tools."""
