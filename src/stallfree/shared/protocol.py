"""The messages between a member of a group and its coordinator. See `stallfree.ipc.channel`.

A member requests batches one by one, always one ahead of the batch it has yielded. Each request therefore reports the
member's progress, and the coordinator can revoke any batch that it has not sent, without a message.
"""

from __future__ import annotations

import enum
import json
from typing import NamedTuple

NEWCOMER = -1
"""Sent by a newcomer as the number of its first message; other members send the batch that they need next."""


class Kind(enum.IntEnum):
    """Kind of a message. Answers carry the serial of the request."""

    # sent by a member
    HELLO = 2  # the first message; the body is a `Hello`, `number` the batch needed next, or `NEWCOMER`
    REQUEST = 3  # request batch `number`; batch `value` is released, unless it is -1
    SKIP = 4  # batches before `number` are not needed; grants after batch `value` are discarded
    RELEASE = 5  # batch `number` is released
    LEAVE = 6
    EXPLAIN = 7  # request the reason why batch `number` is not ready
    # sent by the coordinator
    WELCOME = 11  # admitted to epoch `number`, with `value` members; the body is the ring's folder
    BATCH = 12  # batch `number`; the body is a result; the member may hold `value` batches
    SKIPPED = 13  # the group serves from batch `number` on
    EPOCH_ADVANCED = 14  # the group is in epoch `number`
    EXPLANATION = 15  # the body is the reason as text
    LEFT = 16  # other members remain


class Hello(NamedTuple):
    """The description that a member sends when it connects.

    Attributes:
        job: identifier shared by all ranks of a job.
        ranks: number of the job's processes on this host.
        catchup: whether a newcomer joins the active epoch.
        name: name of its script, for messages.
    """

    job: str
    ranks: int
    catchup: bool
    name: str

    def pack(self) -> bytes:
        """Return the description as bytes."""
        return json.dumps(self).encode()


def unpack_hello(packed: bytes | memoryview) -> Hello:
    """Unpack the bytes that `Hello.pack` returned."""
    return Hello(*json.loads(bytes(packed)))
