"""Coordinated prep: each batch is prepared once for all jobs of a host."""
