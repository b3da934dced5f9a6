"""A web server that takes files, as WebDAV does: GET with ranges, HEAD, PUT, DELETE; where a password is set, to those
who know it. `http_server.py FOLDER [USER:PASSWORD [CERTIFICATE KEY]]` prints its port.

A process of its own, since GDAL waits for an answer without letting other Python threads run.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.raster.range_server import Ranges, serve


class Files(Ranges):
    """Refuses what lies in a folder that is not there."""

    asked = ""

    def do_GET(self) -> None:
        if self._knows():
            super().do_GET()

    def do_HEAD(self) -> None:
        if self._knows():
            super().do_HEAD()

    def do_PUT(self) -> None:
        path = Path(self.translate_path(self.path))
        length = int(self.headers["Content-Length"])
        sent = self.rfile.read(length)
        if not self._knows():
            return
        if not path.parent.is_dir():
            self.send_error(409)
            return
        there = path.exists()
        path.write_bytes(sent)
        self._say(204 if there else 201)

    def do_DELETE(self) -> None:
        if self._knows():
            Path(self.translate_path(self.path)).unlink()
            self._say(204)

    def _knows(self) -> bool:
        wanted = "Basic " + base64.b64encode(self.asked.encode()).decode()
        if not self.asked or self.headers.get("Authorization") == wanted:
            return True
        self.send_error(401)
        return False

    def _say(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


if __name__ == "__main__":
    Files.asked = sys.argv[2] if len(sys.argv) > 2 else ""
    serve(Files, sys.argv[1], *sys.argv[3:])
