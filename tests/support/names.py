"""Names of cases that are the same in every process, so that several of them can share the tests."""

import re


def named(value: object) -> str:
    """`str(value)` without addresses in memory."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))
