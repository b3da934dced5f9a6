"""`docs/design.md`: its table limits the size of each room, and the places that it names are there. The page
"Reading the code in half an hour": what it names is there, and what it draws is what the code gives."""

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from pkgutil import resolve_name
from types import FunctionType

import pytest

from tests.comm.launching import PACKAGE, ROOT
from tiledseg.architecture.unet import UNet
from tiledseg.config.run import Config
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.halo import minimum_halo, network_footprint
from tiledseg.geometry.tiling import deal, make_tiling

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
    sizes = [lines([path]) for path in everything if not path.name.startswith("__")]
    assert SMALLEST <= min(sizes) <= max(sizes) <= LARGEST


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


READING = (ROOT / "docs" / "reading-the-code.md").read_text()

NETWORK = UNet(levels=3, base_channels=8, bands=4, classes=5)
GRAPH = NETWORK.graph()
TILING = make_tiling((768, 768), (4, 4), network_footprint(GRAPH))
TILE = TILING.tiles[5]

FILES = sorted(set(re.findall(r"[a-z][\w-]*(?:/[\w-]+)*(?:\.py|\.md|/)(?![\w/])", READING)))
NAMES = sorted(set(re.findall(r"`([a-z_]\w*(?:\.\w+)+)`", READING)) - set(FILES) - {"run.yaml"})


def is_of_the_package(name: str) -> bool:
    """A module, or something that a module defines: not what it imports."""
    try:
        found = resolve_name(f"tiledseg.{name}")
    except (ImportError, AttributeError):
        return False
    return not isinstance(found, type | FunctionType) or f"tiledseg.{name}.".startswith(f"{found.__module__}.")


def is_a_key(name: str) -> bool:
    """A key of the configuration, `group.key`."""
    group, _, key = name.partition(".")
    return hasattr(getattr(Config(), group, None), key)


@pytest.mark.parametrize("name", FILES)
def test_files_are_there(name: str) -> None:
    assert any((root / name).exists() for root in (ROOT, PACKAGE, PACKAGE.parent, ROOT / "docs"))


@pytest.mark.parametrize("name", NAMES)
def test_names_are_there(name: str) -> None:
    assert is_of_the_package(name) or is_a_key(name) or name in GRAPH.names


def test_the_page_names_each_room_and_stays_within_half_an_hour() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    passed_by = {"synthetic"}  # where the scenes of the examples come from
    assert rooms - {name.split(".")[0] for name in NAMES} == passed_by
    assert len(READING.split()) < 3600  # 120 words a minute
    assert max(map(len, READING.splitlines())) < 120


def test_tile_is_as_drawn() -> None:
    inside, around = Interval(192, 384), Interval(168, 408)
    assert (TILE.core, TILE.context, TILE.output) == (Box(inside, inside), Box(around, around), Box(around, around))
    assert re.findall(r"^ *(?:row )?(\d+) +[|+]", READING, re.MULTILINE) == ["168", "192", "384", "408"]
    assert re.search(r"column +168 +192 +384 +408\n", READING)
    assert (len(GRAPH), minimum_halo(GRAPH)) == (49, (22, 22))
    assert "49 nodes" in READING
    assert "gives 22 pixels" in READING
    assert (TILING.footprint.alignment, TILING.footprint.before) == (4, 24)
    shares = deal(TILING.contexts, 2)
    assert [len(share) for share in shares] == [8, 8]
