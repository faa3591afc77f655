"""The client library is imported before any thread uses it: a fork during an import leaves a lock that stays taken."""

from __future__ import annotations

from warm import Interpreter

PROGRAM = """
import sys
import numpy as np
from stallfree.stores.addresses import Address
from stallfree.stores.shard import FixedLocation, Shard
print("redis.connection" in sys.modules)
Shard(FixedLocation(Address()))
print("redis.connection" in sys.modules)
before = set(sys.modules)
np.unique(np.arange(3), return_index=True)
print(sorted(set(sys.modules) - before))
"""


def test_threads_import_nothing_later(interpreter: Interpreter) -> None:
    ended = interpreter.run(PROGRAM)
    assert ended.code == 0, ended.err
    assert ended.out.split() == ["False", "True", "[]"]
