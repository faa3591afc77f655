"""What a member of a group and its coordinator send to each other. See `stallfree.ipc.consumers`.

A member asks for batches one by one, always one ahead of what it has handed out. So its request says how far it is, and
the coordinator can take back all that it has not sent yet, without a message.
"""

from __future__ import annotations

import enum
import json
from typing import NamedTuple

VERSION = 2

NEWCOMER = -1
"""In the place of the number of a member's first message, which is the batch that it needs next."""


class Kind(enum.IntEnum):
    """What a message is. Answers have the serial of the request."""

    # of a member
    ASK = 3  # for batch `number`; batch `value`, or -1, is released
    SKIP = 4  # nothing before batch `number` is needed, nothing that was granted after batch `value` will be taken
    RELEASE = 5  # of batch `number`
    BYE = 6
    # of a visitor
    WHY = 7  # is batch `number` not there?
    # of the coordinator
    WELCOME = 11  # to epoch `number`, with `value` members; the body is the ring's folder
    BATCH = 12  # `number`; the body is a result; so many as `value` says may be held
    SKIPPED = 13  # the group serves from batch `number` on
    EPOCH_ADVANCED = 14  # the group is in epoch `number`
    BECAUSE = 15  # text in the body
    FAREWELL = 16  # other members remain


class Hello(NamedTuple):
    """A member introduces itself.

    Attributes:
        job: the same for all ranks of a job.
        ranks: how many of its processes are on this host.
        catchup: whether a newcomer is to take part in the epoch under way.
        name: of its script, for messages.
    """

    job: str
    ranks: int
    catchup: bool
    name: str

    def pack(self) -> bytes:
        """As bytes."""
        return json.dumps(self).encode()


def unpack_hello(packed: bytes | memoryview) -> Hello:
    """The member that was packed."""
    return Hello(*json.loads(bytes(packed)))
