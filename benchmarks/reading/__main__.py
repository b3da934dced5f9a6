"""How fast are halo'd windows read, by format and by way of reading? All ways in one run, interleaved.

    python -m benchmarks.reading [--quick] [--repeats 7] [--folder DIR] [--json FILE]

Ways: a memory map of the raw pixels (the limit), this project's reader with one and two threads (in the order of a
step, and with the windows shuffled), and the plain loop that a user would write with rasterio and a DataLoader.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import torch
from rasterio.shutil import copy as copy_raster
from torch.utils.data import DataLoader, Dataset

from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.raster.mirrored_reader import prefetch
from tiledseg.raster.reader import open_raster
from tiledseg.raster.tile_store import StorePlan, write_store
from tiledseg.scene import main as scene

HALO = 96
FOOTPRINT = Footprint(16, HALO, HALO)
FORMATS: dict[str, dict[str, Any]] = {
    "strips, deflate": {"driver": "GTiff", "compress": "deflate", "tiled": False},
    "256 px blocks, deflate": {"driver": "GTiff", "compress": "deflate", "tiled": True, "block": 256},
    "512 px blocks, deflate": {"driver": "GTiff", "compress": "deflate", "tiled": True, "block": 512},
    "256 px blocks, zstd": {"driver": "GTiff", "compress": "zstd", "tiled": True, "block": 256},
    "512 px blocks, zstd": {"driver": "GTiff", "compress": "zstd", "tiled": True, "block": 512},
    "512 px blocks, uncompressed": {"driver": "GTiff", "tiled": True, "block": 512},
    "COG, deflate": {"driver": "COG", "compress": "deflate", "overviews": "none"},
}
PLAIN = ("strips, deflate", "256 px blocks, deflate", "512 px blocks, zstd", "512 px blocks, uncompressed")
STORE, MEMORY_MAP = "HDF5 tile store", "memory map"


@dataclass(frozen=True)
class Size:
    """Of the raster and of the windows, pixels."""

    height: int
    width: int
    context: int

    @property
    def tiling(self) -> Tiling:
        """Tiles with equal cores."""
        core = self.context - 2 * HALO
        return make_tiling((self.height, self.width), (self.height // core, self.width // core), FOOTPRINT)

    @property
    def windows(self) -> list[Box]:
        """The contexts that no edge of the raster cuts: they have the same size."""
        contexts = (tile.context for tile in self.tiling.tiles)
        return [context for context in contexts if context.shape == (self.context, self.context)]


class PlainDataset(Dataset):
    """What a user would write: open, read the window, hand it to torch."""

    def __init__(self, path: str, windows: Sequence[Box]) -> None:
        self.path = path
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> torch.Tensor:
        box = self.windows[index]
        with rasterio.open(self.path) as file:
            pixels = file.read(window=((box.row.start, box.row.stop), (box.col.start, box.col.stop)))
        return torch.from_numpy(pixels)


def make_files(folder: Path, size: Size) -> dict[str, str]:
    """The scene in every format, and its raw pixels; files of an earlier run are used again."""
    source = folder / "scene.tif"
    if not source.exists():
        shape = [str(size.height), str(size.width)]
        if scene(["--size", *shape, "--bands", "4", "--image", str(source), "--labels", str(folder / "labels.tif")]):
            raise SystemExit("the scene could not be written")
    paths = {}
    for name, options in FORMATS.items():
        paths[name] = str(folder / f"{name.replace(', ', '-').replace(' ', '-')}.tif")
        if not os.path.exists(paths[name]):
            options = dict(options)
            if block := options.pop("block", None):
                options |= {"blockxsize": block, "blockysize": block}
            copy_raster(str(source), paths[name], **options)
    paths[STORE] = str(folder / "tiles.h5")
    make_store(paths[STORE], str(source), size.tiling)
    paths[MEMORY_MAP] = str(folder / "pixels.raw")
    if not os.path.exists(paths[MEMORY_MAP]):
        with rasterio.open(source) as file:
            file.read().tofile(paths[MEMORY_MAP])
    return paths


def make_store(path: str, source: str, tiling: Tiling) -> None:
    with open_raster(source) as reader:
        plan = StorePlan((reader.info,), None, (tiling,))
        if not os.path.exists(path):
            write_store(path, plan, lambda _: open_raster(source), lambda _: open_raster(source), lambda _: None)


def through_reader(path: str, windows: Sequence[Box], threads: int) -> Iterator[tuple[int, ...]]:
    """This project's way, with a fresh reader: nothing is left over from the pass before."""
    with open_raster(path) as reader:
        yield from (pixels.shape for pixels, _ in prefetch(windows, reader.read, 0 if threads == 1 else threads, 4))


def through_memory_map(path: str, windows: Sequence[Box], threads: int, size: Size) -> Iterator[tuple[int, ...]]:
    pixels = np.memmap(path, np.uint8, "r", shape=(4, size.height, size.width))
    copied = prefetch(windows, lambda box: np.array(pixels[:, *box.slices]), 0 if threads == 1 else threads, 4)
    yield from (window.shape for window in copied)


def through_loader(loader: DataLoader) -> Iterator[tuple[int, ...]]:
    return (tuple(batch.shape[1:]) for batch in loader)


def make_ways(paths: dict[str, str], size: Size) -> dict[tuple[str, str], Callable[[], Iterator[tuple[int, ...]]]]:
    """Every (format, way of reading) as something that reads all windows once."""
    windows = size.windows
    shuffled = random.Random(0).sample(windows, len(windows))
    orders = {"1 thread": (windows, 1), "2 threads": (windows, 2), "2 threads, shuffled": (shuffled, 2)}
    ways: dict[tuple[str, str], Callable[[], Iterator[tuple[int, ...]]]] = {}
    for name in PLAIN:
        loader = DataLoader(PlainDataset(paths[name], windows), 1, shuffle=True, num_workers=2, persistent_workers=True)
        ways[name, "plain loop"] = partial(through_loader, loader)
    for way, (order, threads) in orders.items():
        for name, path in paths.items():
            if name == MEMORY_MAP:
                ways[name, way] = partial(through_memory_map, path, order, threads, size)
            else:
                ways[name, way] = partial(through_reader, path, order, threads)
    return ways


def milliseconds_a_window(read: Callable[[], Iterator[tuple[int, ...]]], size: Size) -> float:
    start = time.perf_counter()
    shapes = list(read())
    seconds = time.perf_counter() - start
    assert shapes == [(4, size.context, size.context)] * len(size.windows), "a way of reading lost windows"
    return 1e3 * seconds / len(shapes)


def measure(paths: dict[str, str], size: Size, repeats: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds a window for every way, `repeats` times in turn, after one pass that is not counted."""
    ways = make_ways(paths, size)
    found: dict[tuple[str, str], list[float]] = {key: [] for key in ways}
    for repeat in range(-1, repeats):
        for key, read in ways.items():
            took = milliseconds_a_window(read, size)
            if repeat >= 0:
                found[key].append(took)
    return found


def table(found: dict[tuple[str, str], list[float]], sizes: dict[str, int]) -> str:
    """Markdown: median (least - most) milliseconds a window, and windows a second with two threads."""
    columns = ("1 thread", "2 threads", "2 threads, shuffled", "plain loop")
    lines = [
        "| format | MB | 1 thread, ms | 2 threads, ms | 2 threads, shuffled, ms | plain loop, 2 workers, ms | "
        "plain / shuffled | windows/s | of the memory map |",
        "| --- |" + " --- |" * 8,
    ]
    best = {way: statistics.median(found[MEMORY_MAP, way]) for way in columns[:3]}
    for name in dict.fromkeys(name for name, _ in sorted(found, key=lambda key: list(sizes).index(key[0]))):
        cells = [_cell(found.get((name, way))) for way in columns]
        ours = statistics.median(found[name, "2 threads"])
        plain = found.get((name, "plain loop"))
        ratio = "" if not plain else _ratio(plain, found[name, "2 threads, shuffled"])
        share = f"{100 * best['2 threads'] / ours:.0f} %"
        lines.append(
            f"| {name} | {sizes[name] / 1e6:.0f} | {' | '.join(cells)} | {ratio} | {1e3 / ours:.0f} | {share} |"
        )
    return "\n".join(lines)


def _cell(values: list[float] | None) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.1f} ({min(values):.1f} - {max(values):.1f})"


def _ratio(plain: list[float], ours: list[float]) -> str:
    """The median of the ratios of passes that ran side by side."""
    return f"{statistics.median(a / b for a, b in zip(plain, ours, strict=True)):.1f} x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small raster, two repeats: a check, not a measurement")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", help="where to keep the files (default: a temporary folder)")
    parser.add_argument("--json", help="file for all single measurements")
    options = parser.parse_args()
    size = Size(512, 768, 320) if options.quick else Size(6240, 9984, 1440)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        paths = make_files(folder, size)
        load = os.getloadavg()[0]
        found = measure(paths, size, 2 if options.quick else options.repeats)
        sizes = {name: os.path.getsize(path) for name, path in paths.items()}
    if options.json:
        Path(options.json).write_text(json.dumps([[*key, values] for key, values in found.items()], indent=1))
    print(table(found, sizes))
    print(
        f"\n{len(size.windows)} windows of {size.context} x {size.context} x 4 uint8 of a {size.height} x {size.width} "
        f"raster; {len(os.sched_getaffinity(0))} cores, load {load:.1f} before; Python {platform.python_version()}, "
        f"rasterio {rasterio.__version__}, GDAL {rasterio.__gdal_version__}, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
