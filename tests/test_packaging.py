"""All that set-up installs is pinned, installs find the package and its types, the files of
`jobs/packaging` ask for the versions of setup.cfg, and the sdist has all that its tests read."""

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.comm.launching import PACKAGE, ROOT
from tiledseg.errors import VERSION, install


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


PINS = [normal(line.split("==")[0]) for line in lines((ROOT / "constraints.txt").read_text())]


def test_all_that_setup_installs_is_pinned() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    groups = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    named = {normal(Requirement(line).name) for group in groups for line in lines(group)} - {"tiledseg"}
    assert named - set(PINS) == set()
    assert len(set(PINS)) == len(PINS)


def test_an_editable_install_puts_the_folder_on_the_path_and_a_wheel_has_the_types(tmp_path: Path) -> None:
    """A finder in place of the path would hide the package from mypy and editors."""
    names = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
    for name in names:
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "tiledseg", ignore=shutil.ignore_patterns("__pycache__"))
    build = "import setuptools.build_meta as meta; meta.build_editable('e'); meta.build_wheel('w')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next((tmp_path / "e").glob("*.whl"))) as editable:
        (path,) = [name for name in editable.namelist() if "/" not in name]
        assert editable.read(path).decode().strip() == str(tmp_path)
    (wheel,) = (tmp_path / "w").glob("*.whl")
    assert "tiledseg/py.typed" in zipfile.ZipFile(wheel).namelist()
    assert f"pip install '{wheel.name}[vector]'" in install("vector")


FOLDER = ROOT / "jobs" / "packaging"
FOR_US = {"test", "docs", "lint"}
CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
NOT_IN_SPACK = {"s3", "export"}

CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")
PYTHON = SpecifierSet(CONFIG["options"]["python_requires"])
Versions = dict[str, SpecifierSet]


def versions(text: str) -> Versions:
    return {each.name.lower(): each.specifier for each in map(Requirement, lines(text))}


NEEDED = versions(CONFIG["options"]["install_requires"])
EXTRAS = {name: versions(text) for name, text in CONFIG["options.extras_require"].items()}
FOR_PEOPLE = {name: asked for name, asked in EXTRAS.items() if name not in FOR_US | {"all"}}


def test_the_extra_of_all_is_all_that_a_person_may_use() -> None:
    (everything,) = map(Requirement, lines(CONFIG["options.extras_require"]["all"]))
    assert (everything.name, everything.extras) == ("tiledseg", set(FOR_PEOPLE))


def test_conda_asks_for_the_same() -> None:
    recipe = yaml.safe_load((FOLDER / "recipe.yaml").read_text())
    assert recipe["package"] == {"name": "tiledseg", "version": VERSION}

    def conda(found: Versions) -> Versions:
        return {CONDA.get(name, name): asked for name, asked in found.items()}

    run = versions("\n".join(recipe["requirements"]["run"]))
    assert run == {"python": PYTHON, **conda(NEEDED)}
    beside = versions("\n".join(recipe["requirements"]["run_constraints"]))
    assert beside == conda({name: asked for extra in FOR_PEOPLE.values() for name, asked in extra.items()})
    assert recipe["build"]["python"]["entry_points"] == lines(CONFIG["options.entry_points"]["console_scripts"])


def in_spack(asked: SpecifierSet) -> str:
    """Spack's range has both ends: 2.15 has all of 2.15.x, as <2.16 has."""
    low = next(each.version for each in asked if each.operator == ">=")
    high = "".join(each.version for each in asked if each.operator == "<")
    last = re.sub(r"\d+$", lambda minor: str(int(minor[0]) - 1), high)
    return f"@{low}:{last}"


def test_spack_asks_for_the_same() -> None:
    text = (FOLDER / "package.py").read_text()
    versions, variants = (re.findall(rf'^    {name}\("([^"]+)"', text, re.MULTILINE) for name in ("version", "variant"))
    assert (versions, {*variants}) == ([VERSION], FOR_PEOPLE.keys() - NOT_IN_SPACK)
    expected = {(f"py-{name}{in_spack(asked)}", "") for name, asked in NEEDED.items()}
    for extra in variants:
        expected |= {(f"py-{name}{in_spack(asked)}", f"+{extra}") for name, asked in FOR_PEOPLE[extra].items()}
    run = re.findall(r'^    depends_on\("([^"]+)", (?:when="([^"]+)", )?type=\(.*"run"\)\)$', text, re.MULTILINE)
    assert text.count('"run"') == len(run), "of the pattern's form"
    assert {*run} == expected | {(f"python{in_spack(PYTHON)}", "")}
    compile(text, "package.py", "exec")


def test_images_take_the_oldest_python_and_torch_of_their_choice() -> None:
    """Their commands read constraints.txt as the Makefile's environments do."""
    docker, apptainer = ((FOLDER / name).read_text() for name in ("Dockerfile", "tiledseg.def"))
    oldest = next(each.version for each in PYTHON)
    assert re.findall(r"PYTHON=(\S+)", docker) == re.findall(r"From: python:(\S+)-slim", apptainer) == [oldest]
    left_out = re.search(r"grep -vE '(\S+)' constraints", (ROOT / "Makefile").read_text())
    assert left_out is not None
    assert all(f"grep -vE '{left_out[1]}'" in text and '.whl)[all]"' in text for text in (docker, apptainer))


def test_the_sdist_has_its_tests_and_no_traces(tmp_path: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a clone")
    build = f"import setuptools.build_meta as meta; meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True, timeout=120)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        inside = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name and sdist.getmember(name).isfile()}
    missing = {name for name in tracked if not name.startswith((".ci/", ".github/"))} - inside
    assert missing == set()
    made = {name for name in inside if name.startswith("tiledseg.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert {name for name in inside - set(tracked) - made if not Path(ROOT / name).exists()} == set()
    assert not [name for name in inside if "__pycache__" in name or name.startswith(("build/", "runs/", ".venv"))]
