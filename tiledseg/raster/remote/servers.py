"""The variables of the environment that say where URLs lead to and who asks, for GDAL and obstore alike.

GDAL and obstore have names of their own for an S3 server that is not Amazon's. A user sets one: `AWS_ENDPOINT_URL`, as
Amazon's own programs have it, or GDAL's `AWS_S3_ENDPOINT`, `AWS_HTTPS`, `AWS_VIRTUAL_HOSTING`. Keys and region have one
name for all. Web servers are asked with GDAL's `GDAL_HTTP_USERPWD` (user:password) or `GDAL_HTTP_BEARER` (a token).
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from tiledseg.errors import RasterError

_URLS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_PLACE = ("AWS_S3_ENDPOINT", "AWS_HTTPS", "AWS_VIRTUAL_HOSTING", "AWS_REGION", "AWS_DEFAULT_REGION")
_CERTIFICATES = ("GDAL_CURL_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "SSL_CERT_FILE")
_OF_SYSTEMS = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Arch, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
)
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_NO_SIGN_REQUEST")
_USER, _TOKEN = "GDAL_HTTP_USERPWD", "GDAL_HTTP_BEARER"

CONNECT_SECONDS = 5
SILENT_SECONDS = 8
"""Timeout of a silent server while a raster opens: GDAL asks twice, so 16 seconds at most."""

STALLED_SECONDS = 60
"""The same while pixels are read."""

RETRIES = 3
"""Retries of a read that a busy server puts off (429, 500, 502, 503, 504), each after twice the time."""


def advice(environ: Mapping[str, str], scheme: str = "s3") -> str:
    """Return what to do where a server refuses: the names of the variables that were read, never their values."""
    if scheme != "s3":
        used = [name for name in (_TOKEN, _USER) if environ.get(name)]
        return (
            f"it was asked with {used[0]}" if used else f"{_USER} (user:password) or {_TOKEN} (a token) says who asks"
        )
    present = [name for name in (*_KEYS, *_URLS, *_PLACE) if name in environ]
    if any(name in environ for name in _KEYS):
        return f"look at the variables that it was asked with: {', '.join(present)}"
    also = f" ({', '.join(present)} are set)" if present else ""
    return f"set {_KEYS[0]} and {_KEYS[1]}, or {_KEYS[-1]}, on every rank{also}"


def gdal_options(environ: Mapping[str, str], silent_seconds: int = STALLED_SECONDS) -> dict[str, str]:
    """Return GDAL's settings for URLs, without those that the environment sets by GDAL's own names."""
    options = {
        "GDAL_HTTP_CONNECTTIMEOUT": str(CONNECT_SECONDS),
        "GDAL_HTTP_LOW_SPEED_LIMIT": "1",
        "GDAL_HTTP_LOW_SPEED_TIME": str(silent_seconds),
        "GDAL_HTTP_MAX_RETRY": str(RETRIES),
        "GDAL_HTTP_RETRY_DELAY": "0.5",
    }
    scheme, host, _ = _server(environ)
    if host and "AWS_S3_ENDPOINT" not in environ:
        options["AWS_S3_ENDPOINT"] = host
        options["AWS_HTTPS"] = "NO" if scheme == "http" else "YES"
        options["AWS_VIRTUAL_HOSTING"] = "FALSE"
    trusted = certificates(environ) or next(filter(os.path.isfile, _OF_SYSTEMS), "")
    if trusted:  # rasterio's wheels look at one place of one system otherwise, whatever the variables say
        options[_CERTIFICATES[0]] = trusted
    return {name: value for name, value in options.items() if name not in environ}


def certificates(environ: Mapping[str, str]) -> str:
    """Return the file of the authorities to trust: the first that GDAL's variable, curl's, Amazon's or OpenSSL's names;
    empty where none does."""
    return next((environ[name] for name in _CERTIFICATES if environ.get(name)), "")


def is_of_certificates(words: str) -> bool:
    """Return True for a client's words about a certificate that it does not trust, or the file of those that it may."""
    return any(word in words.lower() for word in ("certificate", "ssl", "tls"))


def certificate_advice(environ: Mapping[str, str]) -> str:
    """Return what to do where a server's certificate is not trusted: which variable was read."""
    name = next((name for name in _CERTIFICATES if environ.get(name)), "")
    state = f"{name} is {environ[name]}" if name else "no variable names the authorities to trust"
    return (
        f"{state}; set {_CERTIFICATES[1]} to the file (PEM) of the authority that has signed it, on every rank, and "
        "name the server as its certificate does"
    )


def store_options(scheme: str, place: str, environ: Mapping[str, str], seconds: int, retries: int) -> dict[str, Any]:
    """Return the options of obstore's store of a bucket (s3) or web server `place`, beside S3's keys and region, which
    obstore reads itself. A request takes `seconds` at most, and is retried `retries` times."""
    client: dict[str, Any] = {"timeout": f"{seconds}s", "connect_timeout": f"{CONNECT_SECONDS}s"}
    if authorities := certificates(environ):
        try:
            client["root_certificate"] = Path(authorities).read_bytes()
        except OSError as error:
            raise RasterError(f"cannot read {authorities}: {error.strerror}; {certificate_advice(environ)}") from None
    options: dict[str, Any] = {
        "client_options": client,
        "retry_config": {"max_retries": retries, "retry_timeout": timedelta(seconds=seconds)},
    }
    if scheme != "s3":
        client["allow_http"] = scheme == "http"
        if environ.get(_TOKEN):
            client["default_headers"] = {"Authorization": f"Bearer {environ[_TOKEN]}"}
        elif environ.get(_USER):
            word = base64.b64encode(environ[_USER].encode()).decode()
            client["default_headers"] = {"Authorization": f"Basic {word}"}
        return options
    options["skip_signature"] = _is_true(environ.get("AWS_NO_SIGN_REQUEST", "NO"))
    server_scheme, host, by_host = _server(environ)
    options["virtual_hosted_style_request"] = by_host
    if host:
        options["endpoint"] = f"{server_scheme}://{place}.{host}" if by_host else f"{server_scheme}://{host}"
        options["aws_endpoint_url_s3"] = options["endpoint"]  # a variable of this name would go first
        client["allow_http"] = server_scheme == "http"
    return options


def _server(environ: Mapping[str, str]) -> tuple[str, str, bool]:
    """Return scheme, host (empty: Amazon's) and whether buckets are hosts of their own, as GDAL reads the variables."""
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
