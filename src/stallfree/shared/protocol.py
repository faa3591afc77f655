"""What a member of a group and its conductor say to each other. Fixed layouts, no pickle; integers are little-endian.

A member asks for batches one by one, always one ahead of what it has handed out. So what it has asked for tells how far
it is, and all that the conductor has not given it yet can be taken back without a word.
"""

from __future__ import annotations

import enum
import json
import struct
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from stallfree import errors
from stallfree.error_types import fields_of, make_error
from stallfree.errors import SampleError, StallfreeError, WorkerError, text_of
from stallfree.loader.messages import Result, unpack_result

VERSION = 1


class Kind(enum.IntEnum):
    """What a message is."""

    # of a member
    HELLO = 1
    ASK = 2  # for batch `number`
    SKIP = 3  # nothing before batch `number` is needed, nothing granted after batch `taken` will be taken
    RELEASE = 4  # of batch `number`
    WHY = 5  # who is being waited for?
    BYE = 6
    # of the conductor
    WELCOME = 11  # to epoch `number`; `extra` members; the body is the ring's folder
    BATCH = 12  # a result in the body; `extra` is how many batches may be held
    ALONE = 13  # the group serves from batch `number` on
    MOVED = 14  # the group is in epoch `number`
    BECAUSE = 15  # text in the body
    BROKEN = 16  # an error in the body, which ends the group
    FAREWELL = 17  # to one who leaves others


NOWHERE = -1
"""In the place of a position: a newcomer."""

_REQUEST = struct.Struct("<iiqq")
_HELLO = struct.Struct("<iiiiiiq16s")
_ANSWER = struct.Struct("<iiqq")
_KIND = struct.Struct("<i")


@dataclass(frozen=True)
class Hello:
    """A member introduces itself.

    Attributes:
        pid: its process.
        job: 16 bytes, the same for all ranks of a job.
        rank, ranks: which of the job's processes on this host it is, and how many there are.
        position: the number of the batch that it needs next, or `NOWHERE`.
        catchup: whether a newcomer is to take part in the epoch under way.
        name: of its script, for messages.
    """

    pid: int
    job: bytes
    rank: int
    ranks: int
    position: int
    catchup: bool
    name: str

    def pack(self) -> bytes:
        """As bytes."""
        numbers = (Kind.HELLO, VERSION, self.pid, self.rank, self.ranks, int(self.catchup), self.position)
        return _HELLO.pack(*numbers, self.job) + self.name.encode(errors="replace")[:200]


def unpack_hello(data: bytearray) -> Hello:
    """The member in a message. Raises `StallfreeError` if that is of another release."""
    kind, version, pid, rank, ranks, catchup, position, job = _HELLO.unpack_from(data)
    if (kind, version) != (Kind.HELLO, VERSION):
        raise StallfreeError(
            f"process {pid} speaks version {version} of the group's protocol, this one {VERSION}: install the same "
            "release for all"
        )
    name = data[_HELLO.size :].decode(errors="replace")
    return Hello(pid, job, rank, ranks, position, bool(catchup), name)


def kind_of(data: bytearray) -> int:
    """What kind of message it is."""
    return int(_KIND.unpack_from(data)[0])


def request(kind: int, serial: int = 0, number: int = 0, taken: int = 0) -> bytes:
    """A request of a member."""
    return _REQUEST.pack(kind, serial, number, taken)


def unpack_request(data: bytearray) -> tuple[int, int, int, int]:
    """Kind, serial, number and taken of a request."""
    kind, serial, number, taken = _REQUEST.unpack_from(data)
    return kind, serial, number, taken


def answer(kind: int, serial: int = 0, number: int = 0, extra: int = 0, body: bytes = b"") -> bytes:
    """An answer of the conductor."""
    return _ANSWER.pack(kind, extra, serial, number) + body


def unpack_answer(data: bytearray) -> tuple[int, int, int, int]:
    """Kind, serial, number and extra of an answer."""
    kind, extra, serial, number = _ANSWER.unpack_from(data)
    return kind, serial, number, extra


def body_of(data: bytearray) -> bytearray:
    """The body of an answer."""
    return data[_ANSWER.size :]


def result_of(data: bytearray) -> Result:
    """The result in a BATCH."""
    return unpack_result(body_of(data))


def pack_error(error: BaseException | None, trace: str) -> bytes:
    """An error as text: what members raise must not be unpickled."""
    told: dict[str, object] = {
        "message": "" if error is None else text_of(error),
        "trace": trace,
        "kind": "StallfreeError",
    }
    if isinstance(error, StallfreeError):
        told["kind"] = next(kind.__name__ for kind in type(error).__mro__ if kind in _BASES.values())
    else:
        told["message"] = trace if error is None else f"{type(error).__name__}: {text_of(error)}"
    if error is not None:
        told["types"] = [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__]
        own = {"id": error.id, "where": error.where} if isinstance(error, SampleError) else {}
        told["fields"] = {name: value for name, value in fields_of(error).items() if _plain(value)} | own
    return json.dumps(told, default=str).encode()  # a user's error may hold anything


def _plain(value: object) -> bool:
    return isinstance(value, (str, int, float, type(None))) or (
        isinstance(value, list) and all(isinstance(item, (str, int, float)) for item in value)
    )


def unpack_note(note: bytes | bytearray) -> tuple[StallfreeError, str]:
    """The error that was packed, and its traceback as text. It is of its original type too, if that is known here."""
    told = json.loads(bytes(note))
    base = _BASES.get(told["kind"], StallfreeError)
    if base is WorkerError:
        return WorkerError(told["message"], ids=told["fields"]["ids"]), told["trace"]
    kinds = [kind for module, name in told.get("types", ()) if (kind := _loaded(module, name)) is not None]
    fields = {name: value for name, value in told.get("fields", {}).items() if not name.startswith("__")}
    return make_error(base, kinds[:1], told["message"], fields), told["trace"]


_BASES = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, StallfreeError)
}


def _loaded(module: str, name: str) -> type | None:
    """The type of that name, if its module has been imported: a message must not import anything. Not our own types."""
    if module.split(".")[0] == "stallfree":
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None  # runs no code of theirs
    return found if isinstance(found, type) and issubclass(found, Exception) and found is not Exception else None
