"""A network that can be cut: passes on what comes to a port, until it is stopped (SIGSTOP).

python -m benchmarks.contenders.store_proxy PORT     its own port is the first line that it prints
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

_PIECE = 1 << 20


def pass_on(source: socket.socket, target: socket.socket) -> None:
    """One direction of a connection, to its end."""
    piece = bytearray(_PIECE)
    with contextlib.suppress(OSError):
        while size := source.recv_into(piece):
            target.sendall(memoryview(piece)[:size])
    for side in (source, target):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)


def serve(listening: socket.socket, port: int) -> None:
    """Take connections, and make one to the server for each."""
    while True:
        here, _ = listening.accept()
        try:
            there = socket.create_connection(("127.0.0.1", port))
        except OSError:
            here.close()
            continue
        for side in (here, there):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pair in ((here, there), (there, here)):
            threading.Thread(target=pass_on, args=pair, daemon=True).start()


def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    serve(listening, int(sys.argv[1]))


if __name__ == "__main__":
    main()
