"""Prep on a Ray cluster."""
