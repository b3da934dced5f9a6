"""A server on this machine that answers nothing and remembers who asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Requests:
    """The address of the server, "127.0.0.1:port", and the paths that it was asked for."""

    address: str
    paths: list[str] = field(default_factory=list)


@contextmanager
def requests_seen() -> Iterator[Requests]:
    """A server that runs within the body."""
    seen = Requests("")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.paths.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Nothing on standard error."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        seen.address = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            server.shutdown()
            thread.join()
