"""Processes that belong together: how they are started, connected and ended."""
