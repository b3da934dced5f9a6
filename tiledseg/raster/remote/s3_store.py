"""s3:// beyond reading pixels: what a bucket holds, and files into it. By obstore, of the extra `s3`.

GDAL reads the pixels themselves and needs no extra. Every refusal of a server is one line: the URL, what the server
said, and the variables that were read, never their values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tiledseg.errors import ConfigError, RasterError, TiledsegError, install
from tiledseg.raster.remote.s3_server import (
    advice,
    certificate_advice,
    certificates,
    has_key,
    is_of_certificates,
    store_options,
)

_ASKING_SECONDS, _ASKING_RETRIES = 8, 1
_WRITING_SECONDS, _WRITING_RETRIES = 300, 5
_PART_BYTES, _MOST_PARTS = 8 << 20, 9000  # S3 takes 10,000 parts of 5 GiB each
_PARTS_AT_ONCE = 4


class S3Name(NamedTuple):
    """s3://bucket/key; of a folder the key ends in a slash, or is empty."""

    bucket: str
    key: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    @property
    def parts(self) -> tuple[str, ...]:
        """Of a path that mirrors the URL."""
        return (self.bucket, *self.key.split("/"))


def parse_s3(path: str) -> S3Name | None:
    """The name of an object, or of a folder, of S3's; None for anything else."""
    match = re.fullmatch(r"s3://([^/]+)(?:/(.*))?", path, re.DOTALL)
    return S3Name(match[1], match[2] or "") if match else None


def check_obstore(key: str, path: str) -> None:
    """Raise ConfigError where obstore is not installed; `key` is the flag or the key that wants it for `path`."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise ConfigError(f"{key} {path} needs obstore: {install('s3')}") from None


def list_folder(bucket: str, folder: str, deep: bool) -> list[str]:
    """The keys below `folder` (empty, or ending in a slash), those in folders in it too where `deep`; in no order.

    Raises RasterError where the server refuses, or does not answer for 20 seconds.
    """
    import obstore

    with _asking(f"list {S3Name(bucket, folder).url}"):
        store = _store(bucket, _ASKING_SECONDS, _ASKING_RETRIES)
        if deep:
            chunks: Any = obstore.list(store, folder or None)
        else:
            chunks = [obstore.list_with_delimiter(store, folder or None)["objects"]]
        return [str(entry["path"]) for chunk in chunks for entry in chunk]


def is_there(name: S3Name) -> bool:
    """Whether there is such an object."""
    import obstore

    with _asking(f"look for {name.url}"):
        try:
            obstore.head(_store(name.bucket, _ASKING_SECONDS, _ASKING_RETRIES), name.key)
        except FileNotFoundError:
            return False
        return True


def refusal(name: S3Name) -> str | None:
    """What the server says where it does not give an object: its status, and S3's code; None where it gives it, where
    no key is set, so that nobody need be asked, or obstore is not installed."""
    if not has_key(os.environ):
        return None
    try:
        import obstore
    except ImportError:
        return None
    try:
        obstore.get_range(_store(name.bucket, _ASKING_SECONDS, 0), name.key, start=0, length=1)
    except FileNotFoundError:
        return "the server said 404 Not Found"
    except Exception as error:  # whatever it is, it is told
        return _said(error)
    return None


def check_writable(name: S3Name) -> None:
    """Raise RasterError unless an object of this name may be written: begins an upload in parts, and calls it off,
    which leaves nothing."""
    import obstore

    def nothing() -> Iterator[bytes]:
        raise _CalledOff
        yield b""

    with _asking(f"write {name.url}"):
        try:
            obstore.put(_store(name.bucket, _ASKING_SECONDS, _ASKING_RETRIES), name.key, nothing(), use_multipart=True)
        except _CalledOff:
            return


class _CalledOff(Exception):  # noqa: N818  (no error: an upload that never was)
    pass


def put(name: S3Name, file: Path, beat: Callable[[], None] = lambda: None) -> None:
    """Make an object of the file: whole, or none, and until then an older one stays. `beat` is called while it goes.

    Raises RasterError where the server refuses.
    """
    import obstore

    part = max(_PART_BYTES, -(-file.stat().st_size // _MOST_PARTS))
    with _asking(f"write {name.url}"), file.open("rb") as opened:
        store = _store(name.bucket, _WRITING_SECONDS, _WRITING_RETRIES)
        pieces = _pieces(opened.read, part, beat)
        obstore.put(store, name.key, pieces, chunk_size=part, max_concurrency=_PARTS_AT_ONCE)


def remove(name: S3Name) -> None:
    """Away with an object; nothing where there is none. Raises RasterError where the server refuses."""
    import obstore

    if is_there(name):
        with _asking(f"remove {name.url}"):
            obstore.delete(_store(name.bucket, _ASKING_SECONDS, _ASKING_RETRIES), name.key)


def _pieces(read: Callable[[int], bytes], size: int, beat: Callable[[], None]) -> Iterator[bytes]:
    while piece := read(size):
        beat()
        yield piece


def _store(bucket: str, seconds: int, retries: int) -> Any:
    from obstore.store import S3Store

    with _trusting(certificates(os.environ)):
        return S3Store(bucket, **store_options(bucket, os.environ, seconds, retries))


@contextmanager
def _trusting(authorities: str) -> Iterator[None]:
    """obstore takes no file of authorities: it reads OpenSSL's variable when a store is made."""
    before = os.environ.get("SSL_CERT_FILE")
    if authorities:
        os.environ["SSL_CERT_FILE"] = authorities
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("SSL_CERT_FILE", None)
        else:
            os.environ["SSL_CERT_FILE"] = before


@contextmanager
def _asking(what: str) -> Iterator[None]:
    """Whatever goes wrong inside is one RasterError "cannot `what`: ..."."""
    try:
        yield
    except (TiledsegError, _CalledOff):
        raise
    except Exception as error:
        said = _said(error)
        remedy = certificate_advice(os.environ) if is_of_certificates(said) else advice(os.environ)
        raise RasterError(f"cannot {what}: {said}; {remedy}") from error


def _said(error: Exception) -> str:
    """What the server said, of obstore's words: the status, and the code of S3's; or why there is no answer."""
    text = str(error)
    distrusted = re.search(r"InvalidCertificate\(\s*(\w+)", text)
    if distrusted is not None:
        return f"the server's certificate is not trusted ({distrusted[1]})"
    if "No CA certificates were loaded" in text:
        return "no certificate of an authority was found"
    status = re.search(r"status code: (\d{3}[^:\n]*)", text)
    if status is None:
        line = " ".join(text.splitlines()[0].split()) if text.strip() else type(error).__name__
        return f"the server does not answer ({line.rpartition(' - ')[2][:200]})"
    code = re.search(r"<Code>(\w+)</Code>", text)
    return f"the server said {status[1].strip()}" + (f", {code[1]}" if code else "")
