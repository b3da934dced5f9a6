"""Certificates of one's own for servers of tests, made by the openssl program: of an authority that nobody knows."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

OPENSSL = shutil.which("openssl")
VARIABLES = ("GDAL_CURL_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")
_AUTHORITY = "basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign"


@dataclass(frozen=True)
class Certificates:
    """PEM files: of the `authority`, of a server by its number 127.0.0.1 that it has signed, and the server's `key`."""

    authority: Path
    server: Path
    key: Path


def make_certificates(folder: Path, name: str = "IP:127.0.0.1") -> Certificates:
    """In `folder`; `name`: whose the server's certificate is."""
    made = Certificates(folder / "authority.pem", folder / "server.pem", folder / "server.key")
    new = ("req", "-newkey", "rsa:2048", "-nodes")
    more = [word for line in _AUTHORITY for word in ("-addext", line)]
    _openssl(folder, *new, "-x509", "-keyout", "a.key", "-out", made.authority.name, "-subj", "/CN=a test", *more)
    _openssl(folder, *new, "-keyout", made.key.name, "-out", "asked", "-subj", "/CN=a test's server")
    (folder / "more").write_text(f"subjectAltName={name}\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n")
    signed = ("-CA", made.authority.name, "-CAkey", "a.key", "-CAcreateserial", "-extfile", "more")
    _openssl(folder, "x509", "-req", "-in", "asked", *signed, "-out", made.server.name)
    return made


def _openssl(folder: Path, *words: str) -> None:
    done = subprocess.run([str(OPENSSL), *words], cwd=folder, capture_output=True, text=True, timeout=60, env=_plain())
    assert done.returncode == 0, done.stderr


def _plain() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("OPENSSL_")}
