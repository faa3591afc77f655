"""The client library is imported before any thread uses it: a fork during an import leaves a lock that nobody frees."""

from __future__ import annotations

from warm import Interpreter

PROGRAM = """
import sys
from stallfree.stores.addresses import Address
from stallfree.stores.shard import Fixed, Shard
print("redis.connection" in sys.modules)
Shard(Fixed(Address()))
print("redis.connection" in sys.modules)
"""


def test_a_shard_imports_the_client_when_it_is_made(interpreter: Interpreter) -> None:
    ended = interpreter.run(PROGRAM)
    assert ended.code == 0, ended.err
    assert ended.out.split() == ["False", "True"]


NUMPY = """
import sys
import stallfree.cache
import numpy as np
before = set(sys.modules)
np.unique(np.arange(3), return_index=True)
print(sorted(set(sys.modules) - before))
"""


def test_what_threads_call_of_numpy_imports_nothing_then(interpreter: Interpreter) -> None:
    ended = interpreter.run(NUMPY)
    assert ended.code == 0, ended.err
    assert ended.out.strip() == "[]"
