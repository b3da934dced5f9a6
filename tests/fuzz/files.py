"""Rasters and checkpoints: damaged bytes, edited content; read by the commands that take them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import rasterio

from tests.fuzz.process import Outcome, run
from tests.fuzz.trial import PREDICT, STEPS, Trial, finished_run, same_file, same_weights


def damage_bytes(data: bytes, draw: random.Random) -> bytes:
    """One to three changes of a file's bytes."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        data = draw.choice((_flip, _flip, _flip_head, _cut, _extend, _zero, _swap, _repeat, _set))(data, draw)
    return data


def damage_file(path: Path, draw: random.Random) -> str:
    """Damages a file in place; says which."""
    path.write_bytes(damage_bytes(path.read_bytes(), draw))
    return f"bytes of {path}"


def _flip(data: bytes, draw: random.Random, span: int | None = None) -> bytes:
    if not data:
        return data
    place = draw.randrange(min(len(data), span or len(data)))
    return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]


def _flip_head(data: bytes, draw: random.Random) -> bytes:
    return _flip(data, draw, 400)


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)] if draw.random() < 0.7 else data[:-1]


def _extend(data: bytes, draw: random.Random) -> bytes:
    return data + draw.randbytes(draw.choice((1, 16, 700)))


def _zero(data: bytes, draw: random.Random) -> bytes:
    start, size = draw.randrange(len(data) + 1), draw.choice((1, 8, 512))
    return data[:start] + bytes(min(size, len(data) - start)) + data[start + size :]


def _swap(data: bytes, draw: random.Random) -> bytes:
    a, b = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + data[a:b][::-1] + data[b:]


def _repeat(data: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data) + 1)
    return data[: start + 64] + data[start:]


def _set(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + draw.choice((b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\x00", b"\n")) + data[place + 4 :]


MAP = [*PREDICT, "--tiling.grid", "2"]
LAST = f"reference/step-{STEPS:06d}.tif"


def draw_raster(draw: random.Random, folder: Path) -> Trial:
    """A damaged or edited image is mapped: what comes out is the map of the pixels that are in it."""
    path = folder / "image.tif"
    words = _edit_raster(path, draw) if draw.random() < 0.3 else damage_file(path, draw)
    if draw.random() < 0.25:
        arguments = ["--config", "run.yaml", "--run.output", "out", "--train.epochs", "1"]
        return Trial("train", arguments, f"{words}: train", ("out",), lambda f, o: finished_run(f, "out"))
    return Trial("predict", MAP, f"{words}: predict", ("map.tif",), _check_map)


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
        pixels = pixels[:, : draw.randrange(1, 32), : draw.randrange(1, 32)]
    elif what == "pixels":
        pixels[:, draw.randrange(32), :] = draw.randrange(256)
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


def _check_map(folder: Path, outcome: Outcome) -> list[str]:
    """The map is that of a sound file with the pixels that the damaged one holds."""
    if not (folder / "map.tif").exists():
        return ["exit 0 without map.tif"]
    try:
        with rasterio.open(folder / "image.tif") as file:
            pixels, valid, profile = file.read(), file.dataset_mask(), file.profile
    except rasterio.errors.RasterioError as error:
        return [f"exit 0, but the file cannot be read: {error.__cause__ or error}"]
    sound = {k: profile[k] for k in ("count", "height", "width", "dtype", "nodata", "crs", "transform")}
    with rasterio.open(folder / "sound.tif", "w", driver="GTiff", **sound) as file:
        file.write(pixels)
    again = run("predict", [*MAP, "--image", "sound.tif", "--output", "sound-map.tif"], folder)
    if again.code != 0:
        return [f"exit 0, but a sound file of the same pixels is refused: {again.err.strip()[:200]}"]
    with rasterio.open(folder / "map.tif") as ours, rasterio.open(folder / "sound-map.tif") as theirs:
        if valid.all() and not np.array_equal(ours.read(), theirs.read()):
            return ["exit 0, but the map is not that of the pixels in the file"]
        if (ours.crs, ours.transform) != (theirs.crs, theirs.transform):
            return ["exit 0, but the map lies elsewhere than the image"]
    return []


def draw_checkpoint(draw: random.Random, folder: Path) -> Trial:
    """A run with damaged checkpoints goes on to the same end, is mapped as one of them, or is refused."""
    checkpoints = folder / "run" / "checkpoints"
    steps = sorted(checkpoints.glob("step-*"))
    resumed = draw.random() < 0.5
    if resumed:  # as a job that was stopped after its second or third step
        for step in steps[draw.choice((2, 3)) :]:
            shutil.rmtree(step)
        steps = sorted(checkpoints.glob("step-*"))
        (checkpoints / "latest").write_text(f"{steps[-1].name}\n")
        (folder / "run" / "summary.json").unlink()
    words = _damage_run(folder / "run", draw.choice(steps[-2:]), draw)
    if resumed:
        check = lambda f, o: finished_run(f, "run", STEPS) + same_weights(f)  # noqa: E731
        return Trial("train", ["--config", "run.yaml"], f"{words}: resume", ("run",), check)
    references = tuple(f"reference/{step.name}.tif" for step in steps)
    return Trial("predict", MAP, f"{words}: predict", ("map.tif",), lambda f, o: same_file(f, "map.tif", references))


def _damage_run(run_folder: Path, step: Path, draw: random.Random) -> str:
    kind = draw.randrange(6)
    if kind == 0:
        _edit_manifest(step, draw)
        return f"edited manifest of {step.name}"
    if kind == 1:
        victim = draw.choice([*sorted(step.iterdir()), step.parent / "latest"])
        victim.unlink()
        return f"without {victim.name}"
    if kind == 2:
        (step.parent / "latest").write_bytes(
            draw.choice((b"", b"step-000099\n", b"..\n", b"\xff\n", b"/\n", b"x" * 5000))
        )
        return "another latest"
    if kind == 3:
        return damage_file(run_folder / "metrics.jsonl", draw) if draw.random() < 0.5 else _stray(step, draw)
    return damage_file(draw.choice([path for path in sorted(step.iterdir()) if path.is_file()]), draw)


def _stray(step: Path, draw: random.Random) -> str:
    name = draw.choice((".partial-step-000009", "step-abc", "step-000007", "notes"))
    (step.parent / name).mkdir()
    return f"a stray folder {name}"


def _edit_manifest(step: Path, draw: random.Random) -> None:
    path = step / "manifest.json"
    manifest = json.loads(path.read_text())
    holder: Any = manifest
    while isinstance(holder, dict) and holder:
        key = draw.choice(list(holder))
        if not isinstance(holder[key], dict) or draw.random() < 0.2:
            holder[key] = draw.choice((None, -1, 10**9, "x", [], {}, 1e308, True, "0" * 64))
            break
        holder = holder[key]
    path.write_text(json.dumps(manifest))
