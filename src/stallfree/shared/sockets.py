"""The Unix socket in a group's folder, which only its user can reach: mode 0600 in a folder of mode 0700."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from stallfree.folders import short_path

_NAME = "socket"


def listen(folder: Path) -> socket.socket:
    """A listening socket, in place of what a process that ended left there. It does not block."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        making = f"{_NAME}-{os.getpid()}"
        with short_path(folder) as short:
            mask = os.umask(0o177)
            try:
                listener.bind(f"{short}/{making}")
            finally:
                os.umask(mask)
        listener.listen(128)
        os.rename(folder / making, folder / _NAME)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(folder: Path) -> socket.socket | None:
    """A connection to whoever listens there; None if nobody does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with short_path(folder) as short:
            connection.connect(f"{short}/{_NAME}")
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def process_of(connection: socket.socket) -> int:
    """The process at the other end; 0 if it is in another name space."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder)
