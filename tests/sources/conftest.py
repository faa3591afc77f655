"""A folder of small pictures, and a web server."""

import contextlib
import functools
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pictures import encode, picture


@pytest.fixture
def image_root(tmp_path: Path) -> Path:
    """A folder with three pictures of cats, one of them deeper, and two of dogs."""
    root = tmp_path / "pictures"
    for number, name in enumerate(["cat/2.jpg", "cat/1.JPG", "cat/more/0.png", "dog/a.jpg", "dog/b.jpeg"]):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(picture(number), "PNG" if path.suffix == ".png" else "JPEG"))
    (root / "cat/notes.txt").write_text("no picture")
    (root / "readme.jpg").write_text("beside the classes")
    return root


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Serves folders over HTTP on this host; gives the URL of each."""
    from fsspec.implementations.http import HTTPFileSystem

    def start(root: Path) -> str:
        handler = functools.partial(_QuietHandler, directory=str(root))
        server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        return f"http://127.0.0.1:{server.server_port}"

    with contextlib.ExitStack() as stack:
        yield start
    HTTPFileSystem.clear_instance_cache()
