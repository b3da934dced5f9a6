"""Trials: what is damaged or interrupted, what is run then, and what its result has to be.

An interrupted command is run again, undisturbed: it has to end as if nothing had been.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import rasterio

from benchmarks.forks import Interruption, Outcome, run_function
from tests.small_files import write_raster, write_yaml
from tiledseg.predict import main as predict
from tiledseg.scene import main as scene
from tiledseg.train import main as train

SIDE = 32
MAP = ["--checkpoint", "run", "--image", "image.tif", "--output", "map.tif", "--verbosity", "0", "--workers", "1"]
MAP += ["--tiling.grid", "2"]
STORE = ["--images", "image.tif", "--labels", "labels.tif", "--grid", "2", "--levels", "2", "--convs-per-level", "1"]
SCENE = ["--size", "40", "40", "--image", "scene.tif", "--labels", "classes.tif"]
# Each command that writes a file: what is typed, its outputs, and how often it touches files at most. Interrupted runs:
# tests/crash, benchmarks/faults.
WRITERS: dict[str, tuple[list[str], tuple[str, ...], int]] = {
    "predict": (MAP, ("map.tif",), 60),
    "tile": ([*STORE, "--output", "new.h5"], ("new.h5",), 60),
    "scene": (SCENE, ("scene.tif", "classes.tif"), 60),
}
CONFIG = {
    "data": {"images": "image.tif", "labels": "labels.tif", "classes": 3, "workers": 1},
    "tiling": {"grid": 2},
    "model": {"levels": 2, "convs_per_level": 1, "base_channels": 2},
    "optimizer": {"lr": 0.01},
    "train": {"epochs": 2, "tiles_per_step": 2, "checkpoint_every": 1, "keep_checkpoints": 9},
    "run": {"output": "run", "verbosity": 0},
}


@dataclass(frozen=True)
class Trial:
    """A command on damaged material. `words`: what was done; `outputs`: names that it may make or change; `check`: what
    is wrong with the result of an exit 0."""

    command: str
    arguments: list[str]
    words: str
    outputs: tuple[str, ...]
    check: Callable[[Path], list[str]]
    interruption: Interruption | None = None


def run(command: str, arguments: list[str], folder: Path, interruption: Interruption | None = None) -> Outcome:
    """Run `python -m tiledseg.COMMAND ARGUMENTS` in `folder`."""
    main = importlib.import_module(f"tiledseg.{command}").main
    return run_function(lambda: int(main(arguments)), folder, interruption)


def make_material() -> int:
    """Rasters, a run of four steps, and what undisturbed commands give of them, in the current folder."""
    draw = np.random.default_rng(5)
    labels_HW = np.kron(draw.integers(0, 3, (8, 8)), np.ones((4, 4))).astype(np.uint8)
    write_raster(Path("image.tif"), (draw.integers(0, 60, (3, SIDE, SIDE)) + 60 * labels_HW + 1).astype(np.uint8))
    write_raster(Path("labels.tif"), labels_HW[None])
    write_yaml(Path("run.yaml"), CONFIG)
    Path("reference").mkdir()
    codes = [train(["--config", "run.yaml"])]
    codes.append(predict([*MAP, "--output", "reference/map.tif"]))
    codes.append(scene([*SCENE, "--image", "reference/scene.tif", "--labels", "reference/classes.tif"]))
    return max(codes)


def draw_raster(draw: random.Random, folder: Path) -> Trial:
    """A damaged or edited image is mapped: what comes out is the map of the pixels that are in it."""
    path = folder / "image.tif"
    words = _edit_raster(path, draw) if draw.random() < 0.3 else damage(path, draw)
    if draw.random() < 0.25:
        arguments = ["--config", "run.yaml", "--run.output", "out", "--train.epochs", "1"]
        return Trial("train", arguments, words, ("out",), lambda folder: finished_run(folder / "out"))
    return Trial("predict", MAP, words, ("map.tif",), _is_map_of_its_pixels)


def draw_interrupted(draw: random.Random, folder: Path) -> Trial:
    """A command that writes meets a limit of size, or a signal: at a touch of a file, the same in each run of the case,
    or after a while."""
    command = draw.choice(list(WRITERS))
    arguments, outputs, touches = WRITERS[command]
    way, signal = draw.random(), draw.choice(("SIGKILL", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGTERM"))
    if way < 0.3:
        interruption = Interruption(largest_file=draw.choice((0, 1, 100, 1000, draw.randrange(60_000))))
    elif way < 0.75:
        interruption = Interruption(signal, event=draw.randrange(1, touches))
    else:
        interruption = Interruption(signal, seconds=draw.random() * 0.8)
    return Trial(command, arguments, str(interruption), outputs, lambda folder: whole(command, folder), interruption)


KINDS: dict[str, Callable[[random.Random, Path], Trial]] = {
    "rasters": draw_raster,
    "interrupted writes": draw_interrupted,
}


def damage(path: Path, draw: random.Random) -> str:
    """Damage one to three places of a file: a bit flipped, bytes cut off, overwritten, moved or put in."""
    data = path.read_bytes()
    for _ in range(draw.choice((1, 1, 2, 3))):
        place, way = draw.randrange(len(data) + 1), draw.random()
        if way < 0.4 and data:
            place = draw.randrange(min(len(data), draw.choice((400, len(data)))))  # headers have few bytes
            changed = bytes([data[place] ^ (1 << draw.randrange(8))])
        else:
            changed = draw.choice((bytes(8), bytes(512), b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\n"))
        if way < 0.7:
            data = data[:place] + changed + data[place + len(changed) :]
        elif way < 0.85:
            data = data[:place] if draw.random() < 0.7 else data[:-1]
        else:
            data = data[:place] + draw.choice((data[place - 64 : place], draw.randbytes(16))) + data[place:]
    path.write_bytes(data)
    return f"bytes of {path.name}"


def _edit_raster(path: Path, draw: random.Random) -> str:
    with rasterio.open(path) as file:
        pixels, profile = file.read(), file.profile
    what = draw.choice(("dtype", "nodata", "bands", "size", "pixels", "driver", "tags", "nan"))
    if what == "dtype":
        profile["dtype"] = draw.choice(("uint16", "int16", "float32", "int8", "float64"))
    elif what == "nodata":
        profile["nodata"] = draw.choice((0, 255, 61))
    elif what == "bands":
        pixels = pixels[: draw.choice((1, 2))] if draw.random() < 0.5 else np.concatenate([pixels, pixels])
    elif what == "size":
        pixels = pixels[:, : draw.randrange(1, SIDE), : draw.randrange(1, SIDE)]
    elif what == "pixels":
        pixels[:, draw.randrange(SIDE), :] = draw.randrange(256)
    elif what == "nan":
        profile["dtype"], pixels = "float32", pixels.astype("float32")
        pixels[0, 3, 4] = draw.choice((np.nan, np.inf, 1e38))
    profile |= {"count": pixels.shape[0], "height": pixels.shape[1], "width": pixels.shape[2]}
    if what == "driver":
        profile = {k: profile[k] for k in ("count", "height", "width", "dtype")} | {"driver": "PNG"}
    with rasterio.open(path, "w", **profile) as file:
        file.write(pixels.astype(profile["dtype"]))
        if what == "tags":
            file.update_tags(1, AREA_OR_POINT="Point", OFFSET=str(draw.random()), STATISTICS_MEAN="nan")
    return f"{what} of {path.name}"


def whole(command: str, folder: Path) -> list[str]:
    """What is wrong with the outputs of a command whose inputs are sound."""
    if command == "tile":  # a store is whole where it maps as its image does
        done = run("predict", [*MAP, "--image", "new.h5"], folder)
        return same(folder, "map.tif") if done.code == 0 else [f"new.h5 is torn: {done.err[:200]}"]
    if command == "scene":
        return same(folder, "scene.tif") + same(folder, "classes.tif")
    return same(folder, "map.tif")


def same(folder: Path, name: str) -> list[str]:
    """A file has to be that of undamaged material, byte for byte."""
    if not (folder / name).exists():
        return [f"no {name}"]
    is_same = (folder / name).read_bytes() == (folder / "reference" / name).read_bytes()
    return [] if is_same else [f"{name} is not that of undamaged material"]


def finished_run(path: Path) -> list[str]:
    """What is wrong with the folder of a run that says it is done."""
    try:
        summary = json.loads((path / "summary.json").read_text())
        metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        return [f"the run is not whole: {error}"]
    total, faults = summary["steps"], []
    if not summary["finished"]:
        faults.append(f"the run ended at step {total}, not finished")
    if [line["step"] for line in metrics if "loss" in line] != list(range(1, total + 1)):
        faults.append("metrics.jsonl does not have every step once")
    if not (path / f"checkpoints/step-{total:06d}/manifest.json").exists():
        faults.append(f"no checkpoint of the last step {total}")
    return faults


def _is_map_of_its_pixels(folder: Path) -> list[str]:
    """The map is that of a sound file with the pixels that the damaged one holds."""
    try:
        with rasterio.open(folder / "image.tif") as file:
            pixels, valid, profile = file.read(), file.dataset_mask(), file.profile
    except rasterio.errors.RasterioError as error:
        return [f"the file cannot be read: {error.__cause__ or error}"]
    sound = {k: profile[k] for k in ("count", "height", "width", "dtype", "nodata", "crs", "transform")}
    with rasterio.open(folder / "sound.tif", "w", driver="GTiff", **sound) as file:
        file.write(pixels)
    again = run("predict", [*MAP, "--image", "sound.tif", "--output", "sound-map.tif"], folder)
    if again.code != 0:
        return [f"a sound file of the same pixels is refused: {again.err.strip()[:200]}"]
    with rasterio.open(folder / "map.tif") as ours, rasterio.open(folder / "sound-map.tif") as theirs:
        if valid.all() and not np.array_equal(ours.read(), theirs.read()):
            return ["the map is not that of the pixels in the file"]
        if (ours.crs, ours.transform) != (theirs.crs, theirs.transform):
            return ["the map lies elsewhere than the image"]
    return []


def aftermath(trial: Trial, outcome: Outcome, folder: Path) -> list[str]:
    """What has a final name is whole; and the same command again gives the whole result, and clears the rest."""
    made = [name for name in trial.outputs if (folder / name).is_file()]  # a scene's image may be alone
    is_made = outcome.code == 0 or len(made) == len(trial.outputs)
    faults = [f"after the interruption: {fault}" for fault in trial.check(folder)] if is_made else []
    if outcome.code == 0 or (trial.command == "tile" and (folder / "new.h5").exists()):  # no store is overwritten
        return faults
    again = run(trial.command, trial.arguments, folder)
    if again.hung or again.code != 0:
        return [*faults, f"again: exit {again.code}: {again.err.strip()[:300]}"]
    faults += [f"again: {fault}" for fault in trial.check(folder)]
    left = [path for path in folder.rglob("*") if path.name.startswith(".") or ".part" in path.name]
    return faults + [f"left over after the second run: {path.name}" for path in left if "lock" not in path.name]
