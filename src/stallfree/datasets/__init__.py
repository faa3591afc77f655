"""Data sets with a cache, and the cache loader for code without one."""
