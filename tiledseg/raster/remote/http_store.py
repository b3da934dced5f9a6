"""Files onto a web server by PUT, as WebDAV and object stores take them: `https://` as an output.

By Python's own client, streamed from the disk. Who asks is said by GDAL's variables, so that reading and writing know
the same: GDAL_HTTP_USERPWD (user:password), or GDAL_HTTP_BEARER (a token). Every refusal is one line: the URL, what the
server said, the names of these variables, never their values.
"""

from __future__ import annotations

import base64
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import IO, NamedTuple
from urllib.parse import quote

from tiledseg.errors import RasterError
from tiledseg.raster.remote.s3_server import certificate_advice, certificates, is_of_certificates

_ASKING_SECONDS, _WRITING_SECONDS = 16, 300
_PIECE_BYTES = 1 << 20
_USER, _TOKEN = "GDAL_HTTP_USERPWD", "GDAL_HTTP_BEARER"
_DONE, _NOT_THERE = range(200, 300), (404, 410)


class HttpName(NamedTuple):
    """scheme://server/key, `server` with its port."""

    scheme: str
    server: str
    key: str

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.server}/{self.key}"

    @property
    def parts(self) -> tuple[str, ...]:
        """Of a path that mirrors the URL."""
        return (f"{self.scheme}:", self.server, *self.key.split("/"))


def parse_http(path: str) -> HttpName | None:
    """The name of a file on a web server; None for anything else, and for a URL with a query, which names one answer
    and nothing that could lie beside it."""
    match = re.fullmatch(r"(https?)://([^/?#@]+)/([^?#]+)", path)
    return HttpName(*match.groups()) if match else None


def is_there(name: HttpName) -> bool:
    """Whether there is such a file. Raises RasterError where the server refuses to say."""
    with _asking(f"look for {name.url}"):
        status, said = _ask("HEAD", name)
        if status in _DONE:
            return True
        if status in _NOT_THERE:
            return False
        raise RasterError(said)


def check_writable(name: HttpName) -> None:
    """Raise RasterError where the server does not answer, or refuses this user: nothing is sent, so that only the
    upload itself shows whether it takes files."""
    with _asking(f"write {name.url}"):
        status, said = _ask("HEAD", name)
        if status not in (*_DONE, *_NOT_THERE, 405):
            raise RasterError(said)


def put(name: HttpName, file: Path, beat: Callable[[], None] = lambda: None) -> None:
    """Make a file there of a file here. `beat` is called while it goes. Raises RasterError where the server refuses."""
    with _asking(f"write {name.url}"), file.open("rb") as opened:
        length = {"Content-Length": str(file.stat().st_size), "Content-Type": "application/octet-stream"}
        status, said = _ask("PUT", name, _WRITING_SECONDS, _pieces(opened, beat), length)
        if status not in _DONE:
            hint = "; its folder must be there" if status in (*_NOT_THERE, 409) else ""
            raise RasterError(said + hint)


def remove(name: HttpName) -> None:
    """Away with a file; nothing where there is none. Raises RasterError where the server refuses."""
    if is_there(name):
        with _asking(f"remove {name.url}"):
            status, said = _ask("DELETE", name)
            if status not in (*_DONE, *_NOT_THERE):
                raise RasterError(said)


def _ask(
    method: str,
    name: HttpName,
    seconds: int = _ASKING_SECONDS,
    body: Iterator[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """The status, and it in words."""
    with closing(_connection(name, seconds)) as connection:
        connection.request(method, f"/{quote(name.key)}", body, {**(headers or {}), **_credentials(os.environ)})
        answer = connection.getresponse()
        answer.read()
        return answer.status, f"the server said {answer.status} {answer.reason}"


def _connection(name: HttpName, seconds: int) -> HTTPConnection:
    if name.scheme == "http":
        return HTTPConnection(name.server, timeout=seconds)
    context = ssl.create_default_context(cafile=certificates(os.environ) or None)
    return HTTPSConnection(name.server, timeout=seconds, context=context)


def _credentials(environ: Mapping[str, str]) -> dict[str, str]:
    if environ.get(_TOKEN):
        return {"Authorization": f"Bearer {environ[_TOKEN]}"}
    if environ.get(_USER):
        return {"Authorization": "Basic " + base64.b64encode(environ[_USER].encode()).decode()}
    return {}


def _pieces(opened: IO[bytes], beat: Callable[[], None]) -> Iterator[bytes]:
    while piece := opened.read(_PIECE_BYTES):
        beat()
        yield piece


@contextmanager
def _asking(what: str) -> Iterator[None]:
    """Whatever the server or the way to it says against it is one RasterError "cannot `what`: ..."."""
    try:
        yield
    except (OSError, HTTPException, ValueError) as error:
        said = str(error) if isinstance(error, RasterError) else f"the server does not answer ({_line(error)})"
        remedy = certificate_advice(os.environ) if is_of_certificates(said) else _advice(os.environ)
        raise RasterError(f"cannot {what}: {said}; {remedy}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _advice(environ: Mapping[str, str]) -> str:
    found = [key for key in (_TOKEN, _USER) if environ.get(key)]
    return f"it was asked with {found[0]}" if found else f"{_USER} (user:password) or {_TOKEN} (a token) says who asks"
