"""`docs/design.md`: its table limits the size of each room, and the places that it names are there."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tiledseg"
PAGE = (ROOT / "docs" / "design.md").read_text()
ROWS = re.findall(r"^\| ([^|]+?) \| [^|]+ \| ([\d,]+) \| [\d,]+ \|$", PAGE, re.MULTILINE)
LIMITS = {name.strip("`/"): int(most.replace(",", "")) for name, most in ROWS}
SMALLEST, LARGEST = 30, 400
FRONT = "the front door's files"


def files(room: str) -> list[Path]:
    return sorted(PACKAGE.glob("*.py") if room == FRONT else (PACKAGE / room).rglob("*.py"))


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_every_room_has_a_row() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms | {FRONT} == {name for name in LIMITS if not name.startswith("in all")}


@pytest.mark.parametrize("room", [name for name in LIMITS if not name.startswith("in all")])
def test_a_room_keeps_to_its_limit(room: str) -> None:
    assert lines(files(room)) <= LIMITS[room], f"{room}: take something away, or trade with another room"


def test_the_house_keeps_to_its_limit() -> None:
    (name,) = (name for name in LIMITS if name.startswith("in all"))
    everything = sorted(PACKAGE.rglob("*.py"))
    assert lines(everything) <= LIMITS[name]
    assert len(everything) <= int(re.findall(r"\d+", name)[0])
    assert max(len(path.read_text().splitlines()) for path in everything) <= LARGEST


def test_a_class_name_is_unique() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_places_are_there() -> None:
    named = re.findall(r"`((?:[a-z_]+/)+[\w*]*(?:\.py)?)`", PAGE)
    assert len(named) > 15
    assert [name for name in named if not list(PACKAGE.glob(name)) and not (ROOT / name).exists()] == []


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= 150


def test_no_run_is_tracked_beside_the_rooms() -> None:
    """A run that a test has left in the working folder is not the project's."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    rooms = {name.partition("/")[0] for name in done.stdout.splitlines() if "/" in name}
    assert rooms <= {".ci", "tiledseg", "jobs", "benchmarks", "tests", "docs"}


def test_one_file_names_an_api_of_a_gpus_maker() -> None:
    naming = re.compile(r"torch\.(cuda|xpu|mps)\b|\.is_(cuda|xpu|mps)\b")
    named = [file for file in PACKAGE.rglob("*.py") if naming.search(file.read_text())]
    assert named == [PACKAGE / "memory" / "device.py"]
