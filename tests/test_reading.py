"""The page "Reading the code in half an hour": what it names is there, and what it draws is what the code gives."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

import pytest

from tiledseg.architecture.unet import UNet
from tiledseg.config.run import Config
from tiledseg.config.words import chunk_ranks
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.halo import minimum_halo, network_footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.pipeline.balance import cuts
from tiledseg.pipeline.schedule import ChunkMap, chunk_routes, program
from tiledseg.pipeline.simulation import draw
from tiledseg.raster.samples.sampling import deal

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tiledseg"
PAGE = (ROOT / "docs" / "reading-the-code.md").read_text()

NETWORK = UNet(levels=3, base_channels=8, bands=4, classes=5)
GRAPH = NETWORK.graph()
TILING = make_tiling((768, 768), (4, 4), network_footprint(GRAPH))
TILE = TILING.tiles[5]

FILES = sorted(set(re.findall(r"[a-z][\w-]*(?:/[\w-]+)*(?:\.py|\.md|/)(?![\w/])", PAGE)))
NAMES = sorted(set(re.findall(r"`([a-z_]\w*(?:\.\w+)+)`", PAGE)) - set(FILES) - {"run.yaml"})


@cache
def defined(module: Path) -> frozenset[str]:
    """Names that a module's own lines make, those in its classes with the class in front."""
    found: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        found |= set(_names(node))
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for inner in node.body for name in _names(inner)}
    return frozenset(found)


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def is_of_the_package(name: str) -> bool:
    """A module, or something that a module defines."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        module = PACKAGE.joinpath(*words[:count]).with_suffix(".py")
        if module.is_file():
            return count == len(words) or ".".join(words[count:]) in defined(module)
    return PACKAGE.joinpath(*words).is_dir()


def is_a_key(name: str) -> bool:
    """A key of the configuration, `group.key`."""
    group, _, key = name.partition(".")
    value = getattr(Config(), group, None)
    return is_dataclass(value) and key in [field.name for field in fields(value)]


@pytest.mark.parametrize("name", FILES)
def test_files_are_there(name: str) -> None:
    assert any((root / name).exists() for root in (ROOT, PACKAGE, ROOT / "docs"))


@pytest.mark.parametrize("name", NAMES)
def test_names_are_there(name: str) -> None:
    assert is_of_the_package(name) or is_a_key(name) or name in GRAPH.names


def test_the_page_names_each_room_and_stays_within_half_an_hour() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    passed_by = {"synthetic"}  # where the scenes of the examples come from
    assert rooms - {name.split(".")[0] for name in NAMES} == passed_by
    assert len(PAGE.split()) < 3600  # 120 words a minute
    assert max(map(len, PAGE.splitlines())) < 120


def test_tile_is_as_drawn() -> None:
    inside, around = Interval(192, 384), Interval(168, 408)
    assert (TILE.core, TILE.context, TILE.output) == (Box(inside, inside), Box(around, around), Box(around, around))
    assert re.findall(r"^ *(?:row )?(\d+) +[|+]", PAGE, re.MULTILINE) == ["168", "192", "384", "408"]
    assert re.search(r"column +168 +192 +384 +408\n", PAGE)
    assert (len(GRAPH), minimum_halo(GRAPH)) == (49, (22, 22))
    assert "49 nodes" in PAGE
    assert "gives 22 pixels" in PAGE
    assert (TILING.footprint.alignment, TILING.footprint.before) == (4, 24)
    shares = deal(TILING.tiles, 2, lambda tile: tile.context.area)
    assert [len(share) for share in shares] == [8, 8]


def test_stages_and_their_clock_are_as_drawn() -> None:
    runs = cuts((20, 19, 10))
    stages = re.findall(r"stage (\d): nodes (\d+) to (\d+)", PAGE)
    assert [tuple(map(int, each)) for each in stages] == [(i, a, b - 1) for i, (a, b) in enumerate(runs)]
    routes = chunk_routes(GRAPH, runs)
    travel = {(route.source, route.target, GRAPH.names[route.tensor]) for route in routes}
    near = re.search(r"'-+ (\w+\.pool), (\w+\.stash) -+' +'-+ (\w+\.up) -+'", PAGE)
    far = re.search(r"'-+ (\w+\.stash) -+'\n", PAGE)
    assert near
    assert far
    assert travel == {(0, 1, near[1]), (0, 1, near[2]), (1, 2, near[3]), (0, 2, far[1])}
    pipeline = ChunkMap(chunk_ranks("1f1b", 3), routes)
    assert f"```\n{draw(program('1f1b', pipeline, 4), pipeline)}\n```" in PAGE
