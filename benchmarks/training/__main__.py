"""How fast does one rank train, against the loop that a user would write? Both in one run, taken in turn.

    python -m benchmarks.training [--side 2048] [--repeats 5] [--threads 2] [--json FILE]

The plain loop: 512 px tiles with the same exact halo (so the same gradient), rasterio windows through a DataLoader with
one worker, torch's default memory layout, one loss and one backward a tile. Ours: the trainer's own step, its tiles as
large as --grid makes them. Same network, same raster, same weights; an epoch of one optimizer step each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import rasterio
import torch
from rasterio.windows import Window
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from tiledseg.architecture.unet import UNet
from tiledseg.comm.axes import serial_axes
from tiledseg.comm.collectives import SerialCommunicator
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.execution.halo_modes import Part, ReadMode
from tiledseg.execution.passes import SerialPasses
from tiledseg.execution.precision import make_deterministic
from tiledseg.geometry.efficiency import tiling_efficiency
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.raster.dataset import Dataset as TileDataset
from tiledseg.raster.labels import LabelMap
from tiledseg.raster.prefetch import prefetch
from tiledseg.raster.reader import open_raster
from tiledseg.raster.statistics import Normalization
from tiledseg.scene import main as scene
from tiledseg.training.step import Stepper, StepRules

CLASSES, IGNORED = 5, 255
MEAN, STD = 100.0, 50.0


class PlainTiles(Dataset):
    """What a user would write: open, read the window, normalise, hand it to torch."""

    def __init__(self, image: str, labels: str, tiling: Tiling) -> None:
        self.image, self.labels, self.tiles = image, labels, tiling.tiles

    def __len__(self) -> int:
        return len(self.tiles)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        tile = self.tiles[index]
        with rasterio.open(self.image) as image, rasterio.open(self.labels) as labels:
            x_CHW = image.read(window=_window(tile.context)).astype(np.float32)
            y_HW = labels.read(1, window=_window(tile.core))
        inside = tile.core_in_output
        return (
            torch.from_numpy((x_CHW - MEAN) / STD),
            torch.from_numpy(y_HW).long(),
            (inside.row.start, inside.row.stop, inside.col.start, inside.col.stop),
        )


def _window(box) -> Window:  # type: ignore[no-untyped-def]
    return Window(box.col.start, box.row.start, box.width, box.height)


def plain_epoch(network: torch.nn.Module, image: str, labels: str, tiling: Tiling) -> tuple[float, float]:
    """(seconds, loss) of one optimizer step over all tiles."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    begun = time.perf_counter()
    optimizer.zero_grad()
    total, pixels = 0.0, 0
    for x_BCHW, y_BHW, inside in DataLoader(PlainTiles(image, labels, tiling), batch_size=1, num_workers=1):
        top, bottom, left, right = (int(v) for v in inside)
        logits = network(x_BCHW)[:, :, top:bottom, left:right]
        loss = functional.cross_entropy(logits, y_BHW, ignore_index=IGNORED, reduction="sum")
        loss.backward()
        total += loss.item()
        pixels += int((y_BHW != IGNORED).sum())
    for parameter in network.parameters():
        assert parameter.grad is not None
        parameter.grad /= pixels
    optimizer.step()
    return time.perf_counter() - begun, total / pixels


def our_epoch(network: GraphNetwork, image: str, labels: str, tiling: Tiling) -> tuple[float, float]:
    """The same with the trainer's step and reader."""
    mesh = Mesh(SERIAL, SerialCommunicator(), torch.device("cpu"), "serial", platform.node())
    begun = time.perf_counter()
    normalization = Normalization((MEAN,) * 4, (STD,) * 4)
    label_map = LabelMap.from_config(CLASSES, IGNORED)
    dataset = TileDataset([open_raster(image)], [open_raster(labels)], [tiling], label_map, normalization)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    mode = ReadMode(network, mesh, (tiling,), "fp32")
    stepper = Stepper(optimizer, mesh, SerialPasses(mode), serial_axes(mesh.communicator), StepRules(IGNORED, 0))
    parts = [Part(0, tile) for tile in tiling.tiles]
    samples = prefetch(parts, lambda part: dataset.load(part.image, part.tile), threads=2, depth=2)
    result = stepper.run(0, samples, parts, stop=False)
    stepper.close()
    dataset.close()
    return time.perf_counter() - begun, float(result.loss or 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--side", type=int, default=2048, help="pixels a side of the raster")
    parser.add_argument("--grid", type=int, default=1, help="our tiles a side")
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--base-channels", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    unet = UNet(options.levels, base_channels=options.base_channels, classes=CLASSES)
    footprint = network_footprint(unet.graph())
    side = (options.side, options.side)
    plain_tiling = make_tiling(side, (-(-options.side // 512),) * 2, footprint)
    our_tiling = make_tiling(side, (options.grid,) * 2, footprint)
    plain_network = build_modules(unet, 0)
    our_network = build_modules(unet, 0)
    our_network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
    with tempfile.TemporaryDirectory() as folder:
        image, labels = str(Path(folder) / "image.tif"), str(Path(folder) / "labels.tif")
        scene(["--size", *map(str, side), "--seed", "1", "--image", image, "--labels", labels])
        rows = []
        for repeat in range(options.repeats + 1):
            make_deterministic(False)
            plain = plain_epoch(plain_network, image, labels, plain_tiling)
            make_deterministic(True)
            ours = our_epoch(our_network, image, labels, our_tiling)
            assert abs(plain[1] - ours[1]) < 1e-4 * abs(plain[1]), f"losses differ: {plain[1]} and {ours[1]}"
            if repeat:  # the first pass warms caches and allocators
                rows.append((plain[0], ours[0]))
    pixels = options.side**2
    report = {
        "plain_pixels_per_second": [pixels / p for p, _ in rows],
        "our_pixels_per_second": [pixels / o for _, o in rows],
        "plain_time_over_ours": [p / o for p, o in rows],
        "plain_efficiency": tiling_efficiency(plain_tiling),
        "our_efficiency": tiling_efficiency(our_tiling),
        "threads": options.threads,
        "load": os.getloadavg()[0],
    }
    _print(report, options)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))


def _print(report: dict, options: argparse.Namespace) -> None:
    print(
        f"raster {options.side} x {options.side} x 4, U-Net L={options.levels}, {options.base_channels} channels, fp32"
    )
    print(f"{options.threads} threads, load {report['load']:.1f}, torch {torch.__version__}")
    for name, key in (("plain loop, 512 px", "plain"), (f"tiledseg, grid {options.grid}", "our")):
        rates = [rate / 1e6 for rate in report[f"{key}_pixels_per_second"]]
        print(
            f"{name:20} {statistics.median(rates):.3f} Mpixel/s ({min(rates):.3f} - {max(rates):.3f}), "
            f"E = {report[f'{key}_efficiency']:.3f}"
        )
    ratios = report["plain_time_over_ours"]
    print(f"plain / tiledseg     {statistics.median(ratios):.2f} x ({min(ratios):.2f} - {max(ratios):.2f})")


if __name__ == "__main__":
    main()
