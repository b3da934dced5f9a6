"""Numbers that no memory, index or patience can hold, on the command line of every command."""

from __future__ import annotations

from tests.bad_input.case import Case, predict, train

HUGE = 10**30
_SCENE = "--size 64 64 --image ROOT/huge.tif --labels ROOT/huge-labels.tif"
_TILE = "--images ROOT/image.tif --grid 2 --levels 2 --output ROOT/huge.h5"
_SCORE = "--prediction ROOT/labels.tif --labels ROOT/labels.tif"
_HALO = "--parallel.halo layer"


def _plan(name: str, typed: str, *words: str) -> Case:
    return Case(f"huge-{name}", "plan", f"--size 10000 {typed}", words)


def _scene(name: str, typed: str, *words: str) -> Case:
    return Case(f"huge-{name}", "scene", f"{_SCENE} {typed}", words)


def _tile(name: str, typed: str, *words: str) -> Case:
    return Case(f"huge-{name}", "tile", f"{_TILE} {typed}", words)


def _score(name: str, typed: str, *words: str) -> Case:
    return Case(f"huge-{name}", "evaluate", f"{_SCORE} {typed}", words)


SIZES = (
    *(
        _plan(flag, f"--{flag} {HUGE}", f"--{flag}", str(HUGE), "at most")
        for flag in ("size", "images", "gpus", "mesh")
    ),
    *(_plan(flag, f"--{flag} {HUGE}", flag, str(HUGE), "at most") for flag in ("bands", "classes", "kernel", "levels")),
    _plan("grid", "--size 100000 --grid 1000", "--grid", "1000000 tiles", "32768 at most"),
    _plan("auto", "--size 2147483647 --grid auto --gpu-memory 16GiB", "2147483647", "too many grids", "give a grid"),
    _plan("bandwidth", "--bandwidth 1e-300", "--bandwidth", "1e-300", "at least 1"),
    _plan("stages", f"--stages {HUGE}", "--stages", str(HUGE)),
    _plan("balance", f"--stages 2 --balance [{HUGE},1]", "--balance", str(HUGE)),
    _plan("digits", f"--size {'9' * 5000}", "--size", "invalid int value"),
    _scene("size", f"--size {HUGE} 1", str(HUGE), "2000000"),
    _tile("bands", f"--bands [{HUGE}]", "--bands", "at most"),
    _tile("nodata", "--nodata 1e999", "data.nodata", "inf", "uint8"),
    predict("huge-mesh", f"{_HALO} --parallel.mesh [{HUGE},1]", "parallel.mesh", "at most"),
    _score("raw-value", f'--classes \'[{{"name": "a", "value": {HUGE}}}]\'', str(HUGE), "64 bits"),
    _score("nesting", f"--classes '{'[' * 50000}'", "nests lists and maps", "16 deep"),
    _score("twice", '--classes \'[{"name": "a", "name": "b"}]\'', "'name' a second time", "keep one"),
    train("huge-network", "--model.base_channels 1048576", "model", "GB", "fewer"),
)
