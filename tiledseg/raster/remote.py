"""Objects in buckets: the environment variables of s3:// URLs, and listing and writing by obstore.

GDAL reads pixels. obstore (the extra `s3`) lists and writes s3://bucket/key. For a server other than Amazon's, users
set `AWS_ENDPOINT_URL`, as for Amazon's own programs, or GDAL's `AWS_S3_ENDPOINT`, `AWS_HTTPS`, `AWS_VIRTUAL_HOSTING`.
An error is one line: the URL, the server's words, and the names of the variables read, never their values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from tiledseg.errors import RasterError, TiledsegError, require

_URLS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_PLACE = ("AWS_S3_ENDPOINT", "AWS_HTTPS", "AWS_VIRTUAL_HOSTING", "AWS_REGION", "AWS_DEFAULT_REGION")
_CERTIFICATES = ("GDAL_CURL_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "SSL_CERT_FILE")
_OF_SYSTEMS = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Arch, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
)
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_NO_SIGN_REQUEST")

CONNECT_SECONDS = 5
SILENT_SECONDS, STALLED_SECONDS = 8, 60
"""Timeouts of a silent server: for opening a raster (GDAL makes two requests), and for reading pixels."""
_ASKING_SECONDS = 8
_READING_RETRIES = 3
_WRITING_SECONDS, _WRITING_RETRIES = 300, 5
_PART_BYTES, _MOST_PARTS = 8 << 20, 9000  # S3 allows 10,000 parts of 5 GiB each


class RemoteName(NamedTuple):
    """s3://bucket/key: an object. The key of a folder ends in a slash, or is empty."""

    bucket: str
    key: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


def parse_s3(path: str) -> RemoteName | None:
    """Return the name of an object or folder in a bucket; None for any other path."""
    match = re.fullmatch(r"s3://([^/]+)(?:/(.*))?", path, re.DOTALL)
    return RemoteName(match[1], match[2] or "") if match else None


def is_bucket_folder(path: str) -> bool:
    """Return True if the path is s3://bucket, or s3://bucket/folder/ with the slash."""
    name = parse_s3(path)
    return name is not None and (name.key.endswith("/") or not name.key)


def list_folder(path: str, key: str, deep: bool = False) -> list[str]:
    """Return the URLs of the objects in a bucket's folder (`deep`: and in its subfolders), in no order. `key`: the flag
    or configuration key of `path`."""
    require(f"{key} {path}", "s3", "obstore")
    import obstore

    folder = parse_s3(path)
    if folder is None:
        raise RasterError(f"{key}: the bucket's name has a wildcard or a field; name one bucket")
    with _asking(f"list {folder.url}", folder) as store:
        below = folder.key or None
        chunks: Any = obstore.list(store, below) if deep else [obstore.list_with_delimiter(store, below)["objects"]]
        return [folder._replace(key=str(entry["path"])).url for chunk in chunks for entry in chunk]


def is_there(name: RemoteName) -> bool:
    """Return True if the server has the file."""
    import obstore

    with _asking(f"look for {name.url}", name) as store:
        try:
            obstore.head(store, name.key)
        except FileNotFoundError:
            return False
        return True


def check_writable(name: RemoteName) -> None:
    """Raise RasterError if the server does not answer, or refuses this user: start a multipart upload and abort it,
    which leaves nothing."""
    import obstore

    def nothing() -> Iterator[bytes]:
        raise _CalledOffError
        yield b""

    with suppress(_CalledOffError), _asking(f"write {name.url}", name) as store:
        obstore.put(store, name.key, nothing(), use_multipart=True)


class _CalledOffError(TiledsegError):
    """The abort of the upload of `check_writable`."""


def put(name: RemoteName, file: Path, beat: Callable[[], None] = lambda: None) -> None:
    """Upload a file, whole or not at all; until then an older object stays. `beat` is called for each part."""
    import obstore

    part = max(_PART_BYTES, -(-file.stat().st_size // _MOST_PARTS))

    def pieces() -> Iterator[bytes]:
        while piece := opened.read(part):
            beat()
            yield piece

    with _asking(f"write {name.url}", name, _WRITING_SECONDS, _WRITING_RETRIES) as store, file.open("rb") as opened:
        obstore.put(store, name.key, pieces(), chunk_size=part, max_concurrency=4)


def remove(name: RemoteName) -> None:
    """Delete an object, if it exists."""
    import obstore

    with _asking(f"remove {name.url}", name) as store, suppress(FileNotFoundError):
        obstore.delete(store, name.key)


def object_store(url: str) -> Any:
    """Return obstore's store rooted at a URL."""
    from obstore.store import S3Store, from_url

    name = parse_s3(url)
    options = store_options(name.bucket if name else "", os.environ, STALLED_SECONDS, _READING_RETRIES)
    if name is not None:
        return S3Store(name.bucket, prefix=name.key, **options)
    options["client_options"]["allow_http"] = url.startswith("http://")
    return from_url(url, client_options=options["client_options"], retry_config=options["retry_config"])


@contextmanager
def _asking(what: str, name: RemoteName, seconds: int = _ASKING_SECONDS, retries: int = 1) -> Iterator[Any]:
    """Yield obstore's store of a bucket. Turn any exception of the body into a RasterError "cannot `what`: ..."."""
    from obstore.store import S3Store

    try:
        yield S3Store(name.bucket, **store_options(name.bucket, os.environ, seconds, retries))
    except TiledsegError:
        raise
    except Exception as error:
        words = said(error)
        raise RasterError(f"cannot {what}: {words}; {advice(os.environ, name.url, words)}") from error


def said(error: Exception) -> str:
    """Return the server's answer from obstore's error: the status and S3's code, or why there is no answer."""
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
    code = re.search(r"<Code>(\w+)</Code>", text)
    return f"the server said {status[1].strip()}" + (f", {code[1]}" if code else "")


def advice(environ: Mapping[str, str], url: str, words: str = "") -> str:
    """Return the remedy for an error `words` at a URL: it names the environment variables read, never their values."""
    if any(word in words.lower() for word in ("certificate", "ssl", "tls", "trust anchor")):
        name = _certificates(environ)
        state = f"{name} is {environ[name]}" if name else "no variable names the authorities to trust"
        return (
            f"{state}; set {_CERTIFICATES[1]} to the PEM file of the authority that signed it, on every rank, and name "
            "the server as its certificate does"
        )
    if not gdal_path(url).startswith("/vsis3/"):
        return "check that its server can be reached"
    present = [name for name in (*_KEYS, *_URLS, *_PLACE) if name in environ]
    if any(name in environ for name in _KEYS):
        return f"check the environment variables of the request: {', '.join(present)}"
    also = f" ({', '.join(present)} are set)" if present else ""
    return f"set {_KEYS[0]} and {_KEYS[1]}, or {_KEYS[-1]}, on every rank{also}"


def _certificates(environ: Mapping[str, str]) -> str:
    """Return the environment variable that names the file of trusted authorities; empty if none is set."""
    return next((name for name in _CERTIFICATES if environ.get(name)), "")


def gdal_options(environ: Mapping[str, str], silent_seconds: int = STALLED_SECONDS) -> dict[str, str]:
    """Return GDAL's settings for URLs, without those set in the environment by GDAL's names. A request that a busy
    server refuses (429, 500, 502, 503, 504) is retried three times, each after twice the pause."""
    options = {
        "GDAL_HTTP_CONNECTTIMEOUT": str(CONNECT_SECONDS),
        "GDAL_HTTP_LOW_SPEED_LIMIT": "1",
        "GDAL_HTTP_LOW_SPEED_TIME": str(silent_seconds),
        "GDAL_HTTP_MAX_RETRY": "3",
        "GDAL_HTTP_RETRY_DELAY": "0.5",
    }
    scheme, host, _ = _server(environ)
    if host and "AWS_S3_ENDPOINT" not in environ:
        options["AWS_S3_ENDPOINT"] = host
        options["AWS_HTTPS"] = "NO" if scheme == "http" else "YES"
        options["AWS_VIRTUAL_HOSTING"] = "FALSE"
    trusted = environ.get(_certificates(environ)) or next(filter(os.path.isfile, _OF_SYSTEMS), "")
    if trusted:  # rasterio's wheels have one distribution's path built in, and ignore the variables
        options[_CERTIFICATES[0]] = trusted
    return {name: value for name, value in options.items() if name not in environ}


def store_options(bucket: str, environ: Mapping[str, str], seconds: int, retries: int) -> dict[str, Any]:
    """Return obstore's options for a bucket; obstore reads S3's keys and region itself. A request takes `seconds` at
    most, and is retried `retries` times."""
    client: dict[str, Any] = {"timeout": f"{seconds}s", "connect_timeout": f"{CONNECT_SECONDS}s"}
    if authorities := environ.get(_certificates(environ)):
        try:
            client["root_certificate"] = Path(authorities).read_bytes()
        except OSError as error:
            remedy = advice(environ, "", "certificate")
            raise RasterError(f"cannot read {authorities}: {error.strerror}; {remedy}") from None
    scheme, host, by_host = _server(environ)
    options: dict[str, Any] = {
        "client_options": client,
        "retry_config": {"max_retries": retries, "retry_timeout": timedelta(seconds=seconds)},
        "skip_signature": _is_true(environ.get("AWS_NO_SIGN_REQUEST", "NO")),
        "virtual_hosted_style_request": by_host,
    }
    if host:
        options["endpoint"] = f"{scheme}://{bucket}.{host}" if by_host else f"{scheme}://{host}"
        options["aws_endpoint_url_s3"] = options["endpoint"]  # overrides an environment variable of this name
        client["allow_http"] = scheme == "http"
    return options


def _server(environ: Mapping[str, str]) -> tuple[str, str, bool]:
    """Return (scheme, host, True if buckets are virtual hosts), as GDAL reads the variables; host "" is Amazon's."""
    own = environ.get("AWS_S3_ENDPOINT")
    url = next((environ[name] for name in _URLS if environ.get(name)), "")
    by_host = _is_true(environ.get("AWS_VIRTUAL_HOSTING", "TRUE" if own or not url else "FALSE"))
    if own and "://" not in own:
        own = f"{'https' if _is_true(environ.get('AWS_HTTPS', 'YES')) else 'http'}://{own}"
    url = own or url
    if url and "://" not in url:
        url = f"https://{url}"
    scheme, _, host = url.partition("://")
    return scheme, host.rstrip("/"), by_host


def _is_true(word: str) -> bool:
    return word.strip().upper() in ("YES", "TRUE", "ON", "1")


VECTOR_ENDINGS = (".geojson", ".gpkg", ".shp", ".fgb")
"""Endings of polygon files."""

REFERENCES = "data.references true (train) or --references"
"""The options that allow a file to name other files and URLs."""

_URL = re.compile(r"(s3|gs|az|https?|ftp)://(.+)")
_PREFIXES = {"s3": "/vsis3/", "gs": "/vsigs/", "az": "/vsiaz/"}


def is_remote(path: str) -> bool:
    """Return True if the path is a URL or goes through one of GDAL's virtual file systems."""
    return path.startswith("/vsi") or _URL.fullmatch(path) is not None


def is_named(path: str) -> bool:
    """Return True if the path is no plain file: remote, or one of GDAL's subdataset names such as netcdf:a.nc:band."""
    return is_remote(path) or re.match(r"\w{2,}:", path) is not None


def is_vector(path: str) -> bool:
    """Return True for a polygon file, by its ending."""
    return path.lower().endswith(VECTOR_ENDINGS)


def gdal_path(path: str) -> str:
    """Return the path as GDAL spells it: s3://bucket/key is /vsis3/bucket/key, http(s) goes through /vsicurl/."""
    match = _URL.fullmatch(path)
    if match is None:
        return path
    if prefix := _PREFIXES.get(match[1]):
        return prefix + match[2]
    return "/vsicurl/" + path
