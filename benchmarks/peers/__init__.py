"""Contenders of other libraries. All but redis-py run in environments of their own, see `benchmarks/venvs.py`."""
