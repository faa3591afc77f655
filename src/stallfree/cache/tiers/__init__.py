"""Tiers: samples in memory, with disks and servers below it."""
