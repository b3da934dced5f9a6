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
    _plan("base-channels", f"--base-channels {HUGE}", "model.base_channels", "at most"),
    _plan("convs", f"--convs-per-level {HUGE}", "model.convs_per_level", "at most"),
    _plan("stride", f"--stride {HUGE}", "--stride", "at most"),
    _plan("nodes", f"--gpus-per-node {HUGE}", "--gpus-per-node", "at most"),
    _plan("grid", "--size 100000 --grid 1000", "--grid", "1000000 tiles", "32768 at most"),
    _plan("auto", "--size 2147483647 --grid auto --gpu-memory 16GiB", "2147483647", "too many grids", "give a grid"),
    _plan("memory", f"--gpu-memory {10**400}TiB", "--gpu-memory", "at most"),
    _plan("flops", f"--flops {10**400}", "--flops", "inf", "at most"),
    _plan("bandwidth", "--bandwidth 1e-300", "--bandwidth", "1e-300", "at least 1"),
    _plan("latency", "--latency 1e300", "--latency", "1e+300", "at most"),
    _plan("stages", f"--stages {HUGE}", "--stages", str(HUGE)),
    _plan("micro-batches", f"--stages 4 --micro-batches {HUGE}", "--micro-batches", str(HUGE)),
    _plan("balance", f"--stages 2 --balance [{HUGE},1]", "--balance", str(HUGE)),
    _plan("digits", f"--size {'9' * 5000}", "--size", "invalid int value"),
    _scene("size", f"--size {HUGE} 1", str(HUGE), "2000000"),
    _scene("seed", f"--seed {HUGE}", "seed", str(HUGE)),
    _scene("workers", f"--workers {HUGE}", "workers", "256"),
    _tile("grid", f"--grid {HUGE}", "--grid", "at most"),
    _tile("halo", f"--halo {HUGE}", "--halo", "at most"),
    _tile("levels", f"--levels {HUGE}", "--levels", "at most"),
    _tile("bands", f"--bands [{HUGE}]", "--bands", "at most"),
    _tile("nodata", "--nodata 1e999", "data.nodata", "inf", "uint8"),
    predict("huge-workers", f"--workers {HUGE}", "--workers", "at most 256"),
    predict("huge-grid", f"--tiling.grid {HUGE}", "tiling.grid", "at most"),
    predict("huge-mesh", f"{_HALO} --parallel.mesh [{HUGE},1]", "parallel.mesh", "at most"),
    predict("huge-fusion", f"{_HALO} --parallel.fusion {HUGE}", "parallel.fusion", "at most"),
    predict("huge-stages", f"--parallel.stages {HUGE}", "parallel.stages", "at most"),
    _score("classes", f"--classes {HUGE}", str(HUGE), "2 to 255"),
    _score("raw-value", f'--classes \'[{{"name": "a", "value": {HUGE}}}]\'', str(HUGE), "64 bits"),
    _score("nesting", f"--classes '{'[' * 50000}'", "nests lists and maps", "16 deep"),
    _score("empty", "--prediction ''", "error: ", "does not exist"),
    _score("twice", '--classes \'[{"name": "a", "name": "b"}]\'', "'name' a second time", "keep one"),
    train("huge-network", "--model.base_channels 1048576", "model", "GB", "fewer"),
)
