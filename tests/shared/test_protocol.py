"""The description that a member of a group sends when it connects."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stallfree.ipc.channel import ERROR
from stallfree.shared.protocol import Hello, Kind, unpack_hello


@given(job=st.text(), ranks=st.integers(1, 1000), catchup=st.booleans(), name=st.text(st.characters()))
def test_hello(**fields: Any) -> None:
    """File names need not be valid text."""
    sent = Hello(**fields)
    assert unpack_hello(memoryview(sent.pack())) == sent


def test_kinds_are_all_different() -> None:
    assert len({ERROR, *map(int, Kind)}) == 1 + len(Kind.__members__)
