"""The Unix socket in a shared folder. Only the folder's user can reach it: the folder has mode 0700."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from stallfree.ipc.folders import short_path

_NAME = "socket"
_MODE = 0o600


def listen(folder: Path) -> socket.socket:
    """Return a non-blocking listening socket; it replaces the socket of an ended process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        making = f"{_NAME}-{os.getpid()}"
        with short_path(folder) as short:
            listener.bind(f"{short}/{making}")
        os.chmod(folder / making, _MODE)
        listener.listen(128)
        os.rename(folder / making, folder / _NAME)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(folder: Path) -> socket.socket | None:
    """Connect to the process that listens in `folder`; returns None if there is none."""
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
    """Return the PID at the other end; 0 if it is in another PID namespace."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder)
