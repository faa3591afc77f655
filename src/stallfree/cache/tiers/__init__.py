"""Tiers: samples in memory, and below it on disks and servers."""
