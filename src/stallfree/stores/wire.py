"""What is said on a connection to a server: commands, and the replies to them.

Replies are read in the order of their commands, each by the method for its kind:

    wire.send(command(b"MGET", *keys))
    values = wire.values(len(keys), buffers)

The server speaks RESP2: `+text`, `-CODE error`, `:number`, `$length` with that many bytes, `*count` with that many
replies; -1 as a length or a count stands for nil.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from stallfree.stores.buffers import Buffers
from stallfree.stores.link import DIRECT, STANDING, Bytes, Link, Lost, Piece, octets
from stallfree.stores.values import Expected

__all__ = ["Lost", "Refused", "Wire", "command"]

Argument = str | int | Piece | Sequence[Piece]

LARGEST = 2 << 30
"""Bytes that a reply may say it has; a server has at most 512 MiB in one string."""

_GLANCE = 64  # bytes that are received where a large value may begin, which are copied once more
_JOIN = 16 << 10  # a piece of a command below this is copied, so that few pieces are sent
_REQUEST = 1 << 20  # bytes that are asked for at once
_LEASE = 8 << 20  # bytes of memory that are taken for several values
_LONGEST_LINE = 64 << 10
_DEPTH = 8
_COUNT = 1 << 20
_RUN = 4  # from so many small strings of one length on, they are copied by one call
_END = np.frombuffer(b"\r\n", np.uint8)


class Refused(Exception):
    """The server answered with an error; the connection is as good as before.

    Attributes:
        code: its first word, for instance "OOM", "NOAUTH" or "MOVED".
        text: all of it.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return Refused, (self.code, self.text)


def command(*arguments: Argument) -> list[Piece]:
    """A command as `Wire.send` takes it. An argument that is a sequence of pieces is sent as one string."""
    if set(map(type, arguments)) == {bytes}:  # many keys: twice as quick as one by one
        strings: Any = arguments
        with contextlib.suppress(IndexError):
            parts = [b""] * (2 * len(strings))
            parts[0::2] = [_HEADS[len(text)] for text in strings]
            parts[1::2] = strings
            return [b"*%d%b\r\n" % (len(strings), b"".join(parts))]
    pieces: list[Piece] = []
    small = bytearray(b"*%d\r\n" % len(arguments))
    for argument in arguments:
        if isinstance(argument, str):
            argument = argument.encode()
        elif isinstance(argument, int):
            argument = b"%d" % argument
        if isinstance(argument, bytes) and len(argument) < _JOIN:
            small += b"$%d\r\n%b\r\n" % (len(argument), argument)
            continue
        views = [octets(piece) for piece in ([argument] if isinstance(argument, _PIECES) else argument)]
        small += b"$%d\r\n" % sum(map(len, views))
        for view in views:
            if len(view) < _JOIN:
                small += view
            else:
                pieces += [small, view]
                small = bytearray()
        small += b"\r\n"
    pieces.append(small)
    return pieces


_HEADS = [b"\r\n$%d\r\n" % size for size in range(512)]
_PIECES = (bytes, bytearray, memoryview, np.ndarray)


class Wire(Link):
    """A connection, and the replies that are read from it. See `Link` on how it is made, and on time limits."""

    def array(self) -> int | None:
        """The next reply is an array: how many replies follow, or None for nil. Raises `Refused` for an error."""
        line = self._line()
        if line[:1] == b"-":
            raise self._refused(line)
        count = self._length(line, b"*", _COUNT)
        self._due += count - 1 if count > 0 else -1
        return None if count < 0 else count

    def integer(self) -> int:
        """The next reply, a number. Raises `Refused` for an error."""
        number = self.reply()
        return number if isinstance(number, int) else self._lost(f"{number!r:.80} came where a number was due")

    def reply(self) -> Any:
        """The next reply, whatever it is: bytes, int, None or a list of these. Raises `Refused` for an error.

        An error within a list is a `Refused` in the list.
        """
        answer = self._reply(0)
        if isinstance(answer, Refused):
            raise answer
        return answer

    def call(self, *arguments: Argument) -> Any:
        """Send one command and give its reply, for what is small. Raises `Refused` for an error."""
        self.send(command(*arguments))
        return self.reply()

    def skip(self) -> None:
        """Drop the next reply, also if it is an error or large."""
        last = self._due - 1
        while self._due > last:
            line = self._line()
            kind = line[:1]
            if kind == b"*":
                self._due += max(0, self._length(line, b"*", _COUNT))
            elif kind == b"$":
                self._skip_string(self._length(line, b"$", LARGEST))
            elif kind not in (b"+", b"-", b":"):
                self._nonsense(line)
            self._due -= 1

    def _skip_string(self, size: int) -> None:
        left = size
        while left > 0:
            if self._start == self._end:
                self._more(STANDING)
            some = min(left, self._end - self._start)
            self._start += some
            left -= some
        if size >= 0:
            self._line_end()

    def value(self, buffers: Buffers) -> Bytes | None:
        """The next reply, a string, in memory of `buffers`; None for nil. Raises `Refused` for an error."""
        line = self._line()
        if line[:1] == b"-":
            raise self._refused(line)
        size = self._length(line, b"$", LARGEST)
        if size < 0:
            self._due -= 1
            return None
        memory = self._memory(buffers, size)[:size]
        if size:
            self._fill(memory.data, 0, b"")
        self._line_end()
        self._due -= 1
        return memory

    def values(self, count: int, buffers: Buffers, expected: Expected | None = None) -> list[Bytes | None]:
        """The next reply, an array of `count` strings: each in memory of `buffers`, at a multiple of 64.

        None stands for nil, and for an empty string. Several values share one piece of memory, which is free again when
        the last of them is. Raises `Refused` for an error, also for one in the place of a string.

        Args:
            count: number of strings, 1 or more.
            buffers: where they are received.
            expected: what the strings should be. They are checked while others are on their way, and in their place the
                records in them are given; None for what is not what it should be.
        """
        values = _Values(self, count, buffers, expected)
        values.read(count)
        return values.out

    def mget(
        self, keys: Sequence[bytes], typical: int, buffers: Buffers, expected: Expected | None = None
    ) -> list[Bytes | None]:
        """Ask for the strings under `keys`, and give them as `values` does.

        They are asked for in requests of about 1 MiB, so that the server has no more than two such replies for this
        connection at a time: the next request is sent when the reply to the one before it begins to be read, and so
        both sides are always busy.

        Args:
            keys: 1 or more.
            typical: bytes of a usual string.
            buffers: where they are received.
            expected: what the strings should be.
        """
        step = max(1, _REQUEST // max(1, typical))

        def ask(start: int) -> tuple[list[Piece], int]:
            return command(b"MGET", *keys[start : start + step]), 1

        return self.in_turn(len(keys), step, ask, buffers, expected)

    def in_turn(
        self,
        count: int,
        step: int,
        ask: Callable[[int], tuple[list[Piece], int]],
        buffers: Buffers,
        expected: Expected | None = None,
    ) -> list[Bytes | None]:
        """Ask for `count` strings, `step` at a time, and give them as `values` does.

        The next question is sent when the reply to the one before it begins to be read.

        Args:
            count: 1 or more.
            step: strings in the reply to each question, but for the last.
            ask: makes the question for the strings from a number on: commands, of which the first is answered by an
                array of the strings, and how many they are. The replies to others are left to be read, after the last
                array.
            buffers: where they are received.
            expected: what the strings should be.
        """
        values = _Values(self, count, buffers, expected)
        self.send(*ask(0))
        for start in range(0, count, step):
            if start + step < count:
                self.send(*ask(start + step))
            try:
                values.read(min(step, count - start))
            except Refused:
                while self._due:
                    self.skip()
                raise
        return values.out

    # -- receiving, beneath -------------------------------------------------------------------------------------------

    def _reply(self, depth: int) -> Any:
        line = self._line()
        kind = line[:1]
        if kind == b"-":
            return self._refused(line)
        answer: Any
        if kind == b"+":
            answer = line[1:]
        elif kind == b":":
            digits = line[1:]
            if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
                self._nonsense(line)
            answer = int(digits)
        elif kind == b"*":
            count = self._length(line, b"*", _COUNT)
            if depth == _DEPTH:
                self._lost("a reply is nested too deep")
            self._due += count - 1 if count > 0 else -1
            return None if count < 0 else [self._reply(depth + 1) for _ in range(count)]
        else:
            size = self._length(line, b"$", LARGEST)
            answer = None
            if size >= 0:
                try:
                    answer = bytearray(size)
                except MemoryError as error:
                    self._lost(f"no memory for a reply of {size} bytes", error)
                if size:
                    self._fill(memoryview(answer), 0, b"")
                answer = bytes(answer)
                self._line_end()
        self._due -= 1
        return answer

    def _refused(self, line: bytes) -> Refused:
        self._due -= 1
        text = line[1:].decode(errors="replace")
        return Refused(text.partition(" ")[0], text)

    def _length(self, line: bytes, kind: bytes, limit: int) -> int:
        digits = line[1:]
        if line[:1] == kind:
            if digits == b"-1":
                return -1
            if digits.isdigit() and len(digits) <= 10 and int(digits) <= limit:
                return int(digits)
        self._nonsense(line)

    def _nonsense(self, line: bytes) -> NoReturn:
        self._lost(f"the server sent {line!r:.80}, which is no reply to what was asked")

    def _memory(self, buffers: Buffers, size: int) -> Bytes:
        try:
            return buffers.take(size)
        except MemoryError as error:
            self._lost(str(error), error)

    def _line(self) -> bytes:
        """The next line, without its end."""
        if self._due <= 0:
            raise RuntimeError("a reply was read that no command has asked for")
        while True:
            end = self._buffer.find(b"\r\n", self._start, self._end)
            if end >= 0:
                line = bytes(self._view[self._start : end])
                self._start = end + 2
                return line
            if self._end - self._start > _LONGEST_LINE:
                self._lost("a line without an end")
            self._more(_GLANCE if self._typical >= DIRECT else STANDING)

    def _line_end(self) -> None:
        """What ends a string."""
        while self._end - self._start < 2:
            self._more(_GLANCE)
        if not self._buffer.startswith(b"\r\n", self._start):
            self._lost("a string was longer than it said")
        self._start += 2

    def _fill(self, target: memoryview, following: int, head: bytes) -> None:
        """Receive as many bytes as `target` has, of a string.

        What surely follows is received with them, to save a call: the end of the string and, if `following` strings of
        the same reply come after it, the head of the next, which is probably as long as `head`.
        """
        size = len(target)
        self._typical = size
        done = 0
        while True:
            there = min(size - done, self._end - self._start)
            if there:
                target[done : done + there] = self._view[self._start : self._start + there]
                self._start += there
                done += there
            left = size - done
            if not left:
                return
            if left < DIRECT:
                self._more(STANDING if size < DIRECT else left + _GLANCE)
                continue
            # The shortest of replies is nil, of 5 bytes.
            extra = self._view[: 2 + min(len(head), 5 * following)]
            got = self._receive(target[done:], extra)
            done += min(left, got)
            self._start, self._end = 0, max(0, got - left)


class _Values:
    """The reading of `count` strings, which come in one array or several."""

    def __init__(self, wire: Wire, count: int, buffers: Buffers, expected: Expected | None) -> None:
        self._wire, self._count, self._buffers, self._expected = wire, count, buffers, expected
        self._standing = np.frombuffer(wire._buffer, np.uint8)
        self.out: list[Bytes | None] = []
        """What was read."""
        self._head = b""  # of the last string
        self._size = 0  # its length
        self._stride = 0  # that, to the next multiple of 64
        self._memory = np.empty(0, np.uint8)
        self._view = self._memory.data
        self._at = 0  # what of the memory is taken

    def read(self, count: int) -> None:
        """The next array, of `count` strings."""
        wire, out, buffer, standing = self._wire, self.out, self._wire._buffer, self._wire._view
        there = wire.array()
        if there != count:
            wire._lost(f"an array of {there} replies came where {count} were due")
        refused = None
        goal = len(out) + count
        while len(out) < goal:
            start, end = wire._start, wire._end
            if self._head and buffer.startswith(self._head, start, end):  # as long as the one before
                whole = (end - start) // (len(self._head) + self._size + 2)
                if self._size > 0 and whole >= _RUN and self._run(min(whole, goal - len(out))):
                    continue
                start = wire._start = start + len(self._head)
            else:
                line = wire._line()
                if line[:1] == b"-":
                    error = wire._refused(line)
                    refused = refused or error
                    out.append(None)
                    continue
                self._set_size(wire._length(line, b"$", LARGEST), line)
                start, end = wire._start, wire._end
            size = self._size
            if size <= 0:
                out.append(None)
                if size == 0:
                    wire._line_end()
            else:
                at = self._room()
                stop = start + size
                if buffer.startswith(b"\r\n", stop, end):
                    self._view[at : at + size] = standing[start:stop]
                    wire._start = stop + 2
                else:
                    wire._fill(self._view[at : at + size], goal - len(out) - 1, self._head)
                    wire._line_end()
                self._at = at + self._stride
                value = self._memory[at : at + size]
                out.append(value if self._expected is None else self._expected.check(len(out), value))
            wire._due -= 1
        if refused is not None:
            raise refused

    def _set_size(self, size: int, line: bytes) -> None:
        self._size, self._head = size, line + b"\r\n"
        self._stride = size + 63 & ~63
        if size > 0:
            self._wire._typical = size

    def _room(self) -> int:
        """Where the next string goes."""
        if self._at + self._size > self._memory.size:
            some = min(_LEASE, self._stride * (self._count - len(self.out)))
            self._memory = self._wire._memory(self._buffers, max(self._size, some))
            self._view, self._at = self._memory.data, 0
        return self._at

    def _run(self, most: int) -> bool:
        """Take strings of one length that are whole in the standing buffer, up to `most`; False if it were none."""
        wire, size, stride, head = self._wire, self._size, self._stride, len(self._head)
        period = head + size + 2
        at = self._room()
        most = min(most, (self._memory.size - at) // stride)
        rows = self._standing[wire._start : wire._start + most * period].reshape(most, period)
        heads, ends = rows[:, :head], rows[:, -2:]
        count = most
        if heads.tobytes() != self._head * most or ends.tobytes() != b"\r\n" * most:
            good = (heads == heads[0]).all(1) & (ends == _END).all(1)
            count = int(good.argmin())
        if not count:
            return False
        values = self._memory[at : at + count * stride].reshape(count, stride)[:, :size]
        values[...] = rows[:count, head:-2]
        wire._start += count * period
        wire._due -= count
        self._at = at + count * stride
        out, expected = self.out, self._expected
        out += list(values) if expected is None else expected.check_rows(len(out), values)
        return True
