"""How fast values move: losses, copies, what enters the network, rasters, and memory that is touched for the first
time."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import rasterio
import torch

from tiledseg.comm.transports.stopwatch import Stopwatch
from tiledseg.execution.input.carrying import network_input
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.reading.reader import open_raster
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.raster.statistics import Normalization
from tiledseg.training.calibration.layers import Rows
from tiledseg.training.losses.objective import pixel_sums

SIDES = (32, 160, 640)
_CLASSES, _CHANNELS, _BANDS, _VALUE = 5, 16, 4, 4
_REPEATS = 5
_ON_A_MAP = rasterio.Affine(1.0, 0.0, 500_000.0, 0.0, -1.0, 5_000_000.0)
_TOUCHED = 1 << 28  # bytes
_LOSS, _COPY, _ENTERING = (6.0, 4.0), (2.0, 2.0), (2.0, 0.0)  # see `cost_model.prices`


def measure_movement(device: torch.device, launch: float) -> Rows:
    """Losses and copies, by the bytes that the cost model counts of each."""
    rows: Rows = {"loss": [], "copy": []}
    for side in SIDES:
        rows["loss"].append(_row(_CLASSES, side**2, _LOSS, _loss(device, side), launch))
        rows["copy"].append(_row(_CHANNELS, side**2, _COPY, _copy(device, side), launch))
    return rows


def _row(
    channels: int, pixels: int, moved: tuple[float, float], seconds: tuple[float, float], launch: float
) -> list[float]:
    size = channels * pixels * _VALUE
    rates = [times * size / max(each - launch, each / 10) for times, each in zip(moved, seconds, strict=True) if times]
    return [1.0, channels, pixels, *(float(f"{rate:.4g}") for rate in (rates[0], rates[-1]))]


def _loss(device: torch.device, side: int) -> tuple[float, float]:
    logits_BKHW = torch.rand(1, _CLASSES, side, side, device=device).contiguous(memory_format=torch.channels_last)
    logits_BKHW.requires_grad_()
    target_BHW = torch.from_numpy(np.arange(side * side).reshape(1, side, side) % _CLASSES).to(device)
    made: list[torch.Tensor] = []
    forward = least(device, lambda: made.append(pixel_sums(logits_BKHW, target_BHW.long(), 255)[0]))
    backward = least(device, lambda: made.pop().backward())
    return forward, backward


def _copy(device: torch.device, side: int) -> tuple[float, float]:
    """Into the middle of a window, as an exchange's."""
    x_BCHW = torch.rand(1, _CHANNELS, side, side, device=device).contiguous(memory_format=torch.channels_last)
    window_BCHW = torch.empty(1, _CHANNELS, side + 2, side, device=device, memory_format=torch.channels_last)
    seconds = least(device, lambda: window_BCHW.narrow(2, 1, side).copy_(x_BCHW))
    return seconds, seconds


def least(device: torch.device, way: Callable[[], object]) -> float:
    """Seconds of the quickest of some calls."""
    watch, found = Stopwatch(device), []
    for _ in range(1 + _REPEATS):
        watch.reset()
        with watch.running():
            way()
        found.append(watch.seconds())
    return min(found[1:])


class Reading(NamedTuple):
    """Seconds a value of a raster of bytes, and of a tile besides, read and labelled; and points of `entering`: what is
    made of a sample before the network takes it."""

    value: float
    tile: float
    entering: list[list[float]]


def measure_reading(device: torch.device, launch: float) -> Reading:
    """From a raster on the disk of temporary files, most likely from the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        image, labels = write_rasters(Path(folder), SIDES[-1])
        found = [_sample(image, labels, each, device) for each in SIDES]
    (small, _), (large, _) = found[0], found[-1]
    value = max(0.0, large - small) / (_BANDS * (SIDES[-1] ** 2 - SIDES[0] ** 2))
    rows = [
        _row(_BANDS, each**2, _ENTERING, (entering, 0.0), launch)
        for each, (_, entering) in zip(SIDES, found, strict=True)
    ]
    return Reading(value, max(0.0, small - value * _BANDS * SIDES[0] ** 2), rows)


def write_rasters(folder: Path, side: int) -> tuple[str, str]:
    """An image and its labels, of five classes, on a map: what knows of maps is in memory then."""
    image, labels = folder / "image.tif", folder / "labels.tif"
    values_CHW = np.random.default_rng(0).integers(0, 255, (_BANDS, side, side), np.uint8)
    _write_raster(image, values_CHW)
    _write_raster(labels, values_CHW[:1] % _CLASSES)
    return str(image), str(labels)


def _write_raster(path: Path, values_CHW: np.ndarray) -> None:
    count, height, width = values_CHW.shape
    layout = {"tiled": True, "blockxsize": 256, "blockysize": 256, "photometric": "minisblack", "crs": "EPSG:32632"}
    with rasterio.open(
        path, "w", driver="GTiff", height=height, width=width, count=count, dtype="uint8", transform=_ON_A_MAP, **layout
    ) as file:
        file.write(values_CHW)


def _sample(image: str, labels: str, side: int, device: torch.device) -> tuple[float, float]:
    """Seconds in which a tile of this side is loaded, and made the network's input."""
    raster = SIDES[-1]
    tiling = make_tiling((raster, raster), (raster // side,) * 2, Footprint(1, 0, 0))
    normalization = Normalization((100.0,) * _BANDS, (50.0,) * _BANDS)
    label_map = LabelMap.from_config(_CLASSES, 255)
    dataset = Dataset([open_raster(image)], [open_raster(labels)], [tiling], label_map, normalization)
    with closing(dataset):
        loading = least(torch.device("cpu"), lambda: dataset.load(0, 0))
        sample = dataset.load(0, 0)
        return loading, least(device, lambda: network_input(sample, device))


def first_touch() -> float:
    """Seconds a byte that the system takes to clear memory for this process."""
    import mmap

    with mmap.mmap(-1, _TOUCHED) as block:
        view = np.frombuffer(block, np.uint8)
        first, second = (_write(view) for _ in range(2))
        del view
    return max(0.0, first - second) / _TOUCHED


def _write(view: np.ndarray) -> float:
    begun = time.perf_counter()
    view[:: os.sysconf("SC_PAGE_SIZE")] = 1
    return time.perf_counter() - begun
