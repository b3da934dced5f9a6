"""Serves a folder with byte ranges, as S3 and any web server for COGs do: `range_server.py FOLDER` prints its port.
With two more words, the files of a certificate and of its key, by TLS. Where there is a file `sent` in the folder, it
gets a line for each answer: a name, and the bytes.

A process of its own, since GDAL waits for an answer without letting other Python threads run.
"""

import functools
import http.server
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_put_off: set[str] = set()


class Ranges(http.server.SimpleHTTPRequestHandler):
    """GET with a Range header; HEAD as it comes."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path.split("?")[0]))
        if not path.is_file():
            self.send_error(404)
            return
        if path.name.startswith("busy") and self.path not in _put_off:  # once
            _put_off.add(self.path)
            self.send_error(503)
            return
        data = path.read_bytes()
        first, last = 0, len(data) - 1
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2] or last), last)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        self.wfile.write(data[first : last + 1])
        if (sent := Path(self.directory, "sent")).exists():
            with sent.open("a") as file:
                file.write(f"{path.name} {last - first + 1}\n")

    def log_message(self, *args: object) -> None:
        pass


def serve(handler: type[Ranges], folder: str, *tls: str) -> None:
    """Prints its port. `tls`: the files of a certificate and of its key."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=folder)) as server:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        print(server.server_port, flush=True)
        server.serve_forever()


@contextmanager
def running(script: str, *words: str) -> Iterator[str]:
    """host:port of a server that is a process of its own."""
    with subprocess.Popen([sys.executable, script, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "a pipe"
        try:
            yield f"127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


if __name__ == "__main__":
    serve(Ranges, *sys.argv[1:])
