"""Files on servers, by obstore (the extra `s3`): s3://bucket/key, and http(s)://server/key by PUT, as WebDAV takes it.

GDAL reads pixels by itself and needs no extra. Every refusal of a server is one line: the URL, the server's words, and
the names of the variables that were read, never their values.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from tiledseg.errors import ConfigError, RasterError, TiledsegError, install
from tiledseg.raster.remote.servers import advice, certificate_advice, is_of_certificates, store_options

_ASKING_SECONDS, _ASKING_RETRIES = 8, 1
_WRITING_SECONDS, _WRITING_RETRIES = 300, 5
_LEAST_RATE = 1 << 20  # bytes a second of a PUT, which is one request however large the file
_PART_BYTES, _MOST_PARTS = 8 << 20, 9000  # S3 takes 10,000 parts of 5 GiB each
_PARTS_AT_ONCE = 4


class RemoteName(NamedTuple):
    """scheme://place/key: a bucket's object, or a file of the server `place` (with its port). The key of a bucket's
    folder ends in a slash, or is empty."""

    scheme: str
    place: str
    key: str

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.place}/{self.key}"

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the parts of a local path that mirrors the URL."""
        return self.scheme, self.place, *self.key.split("/")


def parse_s3(path: str) -> RemoteName | None:
    """Return the name of an object or folder in a bucket; None for any other path."""
    match = re.fullmatch(r"s3://([^/]+)(?:/(.*))?", path, re.DOTALL)
    return RemoteName("s3", match[1], match[2] or "") if match else None


def is_bucket_folder(path: str) -> bool:
    """Return True if the path is s3://bucket, or s3://bucket/folder/ with the slash."""
    name = parse_s3(path)
    return name is not None and (name.key.endswith("/") or not name.key)


def parse_http(path: str) -> RemoteName | None:
    """Return the name of a file on a web server; None for any other path, and for a URL with a query, beside which
    nothing can lie."""
    match = re.fullmatch(r"(https?)://([^/?#@]+)/([^?#]+)", path)
    return RemoteName(*match.groups()) if match else None


def check_obstore(key: str, path: str) -> None:
    """Raise ConfigError where obstore is not installed; `key` is the flag or the key that wants it for `path`."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise ConfigError(f"{key} {path} needs obstore: {install('s3')}") from None


def list_folder(folder: RemoteName, deep: bool) -> list[str]:
    """Return the URLs of the objects in a bucket's folder, where `deep` also of those in folders in it; in no order.

    Raises RasterError where the server refuses, or does not answer for 20 seconds.
    """
    import obstore

    with _naming(f"list {folder.url}", folder):
        store = _store(folder, _ASKING_SECONDS, _ASKING_RETRIES)
        if deep:
            chunks: Any = obstore.list(store, folder.key or None)
        else:
            chunks = [obstore.list_with_delimiter(store, folder.key or None)["objects"]]
        return [folder._replace(key=str(entry["path"])).url for chunk in chunks for entry in chunk]


def is_there(name: RemoteName) -> bool:
    """Return True if the server has the file. Raises RasterError where it refuses to say."""
    import obstore

    with _naming(f"look for {name.url}", name):
        store = _store(name, _ASKING_SECONDS, _ASKING_RETRIES)
        try:
            obstore.head(store, name.key)
        except FileNotFoundError:
            return False
        return True


def check_writable(name: RemoteName) -> None:
    """Raise RasterError where the server does not answer, or refuses this user. A bucket is sent the begin of an upload
    in parts, which is called off and leaves nothing; a web server only a HEAD."""
    import obstore

    def nothing() -> Iterator[bytes]:
        raise _CalledOff
        yield b""

    with _naming(f"write {name.url}", name):
        store = _store(name, _ASKING_SECONDS, _ASKING_RETRIES)
        if name.scheme == "s3":
            with suppress(_CalledOff):
                obstore.put(store, name.key, nothing(), use_multipart=True)
        else:
            with suppress(FileNotFoundError):
                obstore.head(store, name.key)


class _CalledOff(Exception):  # noqa: N818  (no error: an upload that never was)
    pass


def put(name: RemoteName, file: Path, beat: Callable[[], None] = lambda: None) -> None:
    """Put a file onto a server: whole or not at all, and until then an older one stays. `beat` is called meanwhile.

    Raises RasterError where the server refuses.
    """
    import obstore

    size = file.stat().st_size
    with _naming(f"write {name.url}", name), file.open("rb") as opened:
        if name.scheme == "s3":
            part = max(_PART_BYTES, -(-size // _MOST_PARTS))
            store = _store(name, _WRITING_SECONDS, _WRITING_RETRIES)
            obstore.put(
                store, name.key, _pieces(opened.read, part, beat), chunk_size=part, max_concurrency=_PARTS_AT_ONCE
            )
            return
        store = _store(name, _WRITING_SECONDS + size // _LEAST_RATE, _WRITING_RETRIES)
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data, ThreadPoolExecutor(1) as pool:
            sent = pool.submit(obstore.put, store, name.key, memoryview(data), use_multipart=False)
            while not wait([sent], 0.5).done:
                beat()
            sent.result()


def remove(name: RemoteName) -> None:
    """Delete a file of a server, if it is there. Raises RasterError where the server refuses."""
    import obstore

    if is_there(name):
        with _naming(f"remove {name.url}", name):
            obstore.delete(_store(name, _ASKING_SECONDS, _ASKING_RETRIES), name.key)


def _pieces(read: Callable[[int], bytes], size: int, beat: Callable[[], None]) -> Iterator[bytes]:
    while piece := read(size):
        beat()
        yield piece


def _store(name: RemoteName, seconds: int, retries: int) -> Any:
    from obstore.store import HTTPStore, S3Store

    options = store_options(name.scheme, name.place, os.environ, seconds, retries)
    if name.scheme == "s3":
        return S3Store(name.place, **options)
    return HTTPStore.from_url(f"{name.scheme}://{name.place}", **options)


@contextmanager
def _naming(what: str, name: RemoteName) -> Iterator[None]:
    """Turn any exception of the body into a RasterError "cannot `what`: ..."."""
    try:
        yield
    except (TiledsegError, _CalledOff):
        raise
    except Exception as error:
        said = _said(error)
        remedy = certificate_advice(os.environ) if is_of_certificates(said) else advice(os.environ, name.scheme)
        raise RasterError(f"cannot {what}: {said}; {remedy}") from error


def _said(error: Exception) -> str:
    """Return the server's words from obstore's: the status and S3's code, or why there is no answer."""
    text = str(error)
    distrusted = re.search(r"InvalidCertificate\(\s*(\w+)", text)
    if distrusted is not None:
        return f"the server's certificate is not trusted ({distrusted[1]})"
    if "No certificates found" in text:
        return "no certificate of an authority was found"
    status = re.search(r"status code: (\d{3}[^:\n]*)", text)
    if status is None:
        line = " ".join(text.splitlines()[0].split()) if text.strip() else type(error).__name__
        return f"the server does not answer ({line.rpartition(' - ')[2][:200]})"
    if " MKCOL " in text:
        return f"its folder is not there, and the server makes none ({status[1].strip()})"
    code = re.search(r"<Code>(\w+)</Code>", text)
    return f"the server said {status[1].strip()}" + (f", {code[1]}" if code else "")
