"""Where s3:// URLs lead to, by the environment's variables: the one place that says it to GDAL and to obstore.

Either has names of its own for a server that is not Amazon's. A user sets one: `AWS_ENDPOINT_URL`, as Amazon's own
programs have it, or GDAL's `AWS_S3_ENDPOINT`, `AWS_HTTPS`, `AWS_VIRTUAL_HOSTING`. Keys and region have one name for
all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

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
SILENT_SECONDS = 8
"""After which a server that sends nothing is given up while a raster opens: GDAL asks twice, so 16 seconds at most."""

STALLED_SECONDS = 60
"""The same while pixels are read."""


RETRIES = 3
"""Of a request of pixels that a busy server puts off (429, 500, 502, 503, 504), each after twice the time."""


def advice(environ: Mapping[str, str]) -> str:
    """What to do where a server refuses: the names of the variables that were read, never their values."""
    found = [name for name in (*_KEYS, *_URLS, *_PLACE) if name in environ]
    if has_key(environ):
        return f"look at the variables that it was asked with: {', '.join(found)}"
    also = f" ({', '.join(found)} are set)" if found else ""
    return f"set {_KEYS[0]} and {_KEYS[1]}, or {_KEYS[-1]}, on every rank{also}"


def has_key(environ: Mapping[str, str]) -> bool:
    """Whether anything says who asks."""
    return any(name in environ for name in _KEYS)


def gdal_options(environ: Mapping[str, str], silent_seconds: int = STALLED_SECONDS) -> dict[str, str]:
    """GDAL's settings for URLs, without those that its own variables in the environment decide."""
    found = {
        "GDAL_HTTP_CONNECTTIMEOUT": str(CONNECT_SECONDS),
        "GDAL_HTTP_LOW_SPEED_LIMIT": "1",
        "GDAL_HTTP_LOW_SPEED_TIME": str(silent_seconds),
        "GDAL_HTTP_MAX_RETRY": str(RETRIES),
        "GDAL_HTTP_RETRY_DELAY": "0.5",
    }
    scheme, host, _ = _server(environ)
    if host and "AWS_S3_ENDPOINT" not in environ:
        found["AWS_S3_ENDPOINT"] = host
        found["AWS_HTTPS"] = "NO" if scheme == "http" else "YES"
        found["AWS_VIRTUAL_HOSTING"] = "FALSE"
    trusted = certificates(environ) or next(filter(os.path.isfile, _OF_SYSTEMS), "")
    if trusted:  # rasterio's wheels look at one place of one system otherwise, whatever the variables say
        found[_CERTIFICATES[0]] = trusted
    return {name: value for name, value in found.items() if name not in environ}


def certificates(environ: Mapping[str, str]) -> str:
    """The file of the authorities whose certificates are trusted, for GDAL and obstore alike; empty where none is
    named. GDAL's variable, curl's, Amazon's and OpenSSL's, the first that is set."""
    return next((environ[name] for name in _CERTIFICATES if environ.get(name)), "")


def is_of_certificates(said: str) -> bool:
    """Whether a client's words are of a certificate that it does not trust, or of the file that says which it may."""
    return any(word in said.lower() for word in ("certificate", "ssl", "tls"))


def certificate_advice(environ: Mapping[str, str]) -> str:
    """What to do where a server's certificate is not trusted: which variable was read."""
    name = next((name for name in _CERTIFICATES if environ.get(name)), "")
    said = f"{name} is {environ[name]}" if name else "no variable names the authorities to trust"
    return (
        f"{said}; set {_CERTIFICATES[1]} to the file (PEM) of the authority that has signed it, on every rank, and "
        "name the server as its certificate does"
    )


def store_options(bucket: str, environ: Mapping[str, str], seconds: int, retries: int) -> dict[str, Any]:
    """What obstore's S3Store takes for the bucket, beside the keys and the region, which it reads itself. A request
    takes `seconds` at most, and is made once more `retries` times."""
    options: dict[str, Any] = {
        "skip_signature": _is_true(environ.get("AWS_NO_SIGN_REQUEST", "NO")),
        "client_options": {"timeout": f"{seconds}s", "connect_timeout": f"{CONNECT_SECONDS}s"},
        "retry_config": {"max_retries": retries, "retry_timeout": timedelta(seconds=seconds)},
    }
    scheme, host, by_host = _server(environ)
    options["virtual_hosted_style_request"] = by_host
    if host:
        options["endpoint"] = f"{scheme}://{bucket}.{host}" if by_host else f"{scheme}://{host}"
        options["aws_endpoint_url_s3"] = options["endpoint"]  # a variable of this name would go first
        options["client_options"]["allow_http"] = scheme == "http"
    return options


def _server(environ: Mapping[str, str]) -> tuple[str, str, bool]:
    """Scheme, host (empty: Amazon's) and whether buckets are hosts of their own, as GDAL takes these variables."""
    own = environ.get("AWS_S3_ENDPOINT")
    default = "TRUE" if own or not _url(environ) else "FALSE"
    by_host = _is_true(environ.get("AWS_VIRTUAL_HOSTING", default))
    if not own:
        scheme, _, host = _url(environ).partition("://")
        return scheme, host.rstrip("/"), by_host
    scheme = "https" if _is_true(environ.get("AWS_HTTPS", "YES")) else "http"
    if "://" in own:
        scheme, _, own = own.partition("://")
    return scheme, own.rstrip("/"), by_host


def _url(environ: Mapping[str, str]) -> str:
    """The endpoint as a URL; empty where there is none. Without a scheme it is https."""
    url = next((environ[name] for name in _URLS if environ.get(name)), "")
    return url if not url or "://" in url else f"https://{url}"


def _is_true(word: str) -> bool:
    return word.strip().upper() in ("YES", "TRUE", "ON", "1")
