"""Measure a map by crops of one size beside MONAI's `sliding_window_inference`: seconds, and resident memory.

`python -m benchmarks.maps.crops --sizes 2000 20000`: for each size a process maps a scene by `tiledseg.predict_raster`,
and one reads the scene, runs MONAI with the same module, crops and weights, and writes the classes. A line of JSON has
seconds, by the clock and of the processor, the highest resident set above that before the map, and the share of pixels
that agree.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import rasterio
import torch
from torch import nn

import tiledseg

BANDS, CLASSES, WAYS = 3, 5, ("tiledseg", "monai")


class PatchMixer(nn.Module):
    """A module of one input size: patches with learned places, mixed by four blocks of attention."""

    def __init__(self, side: int, width: int = 192) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(BANDS, width, 16, 16), nn.Parameter(torch.randn((side // 16) ** 2, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.mixer = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
        self.head = nn.ConvTranspose2d(width, CLASSES, 16, 16)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        x_BCHW = self.patches(x_BCHW)
        mixed = self.mixer(x_BCHW.flatten(2).transpose(1, 2) + self.places)
        return self.head(mixed.transpose(1, 2).reshape(x_BCHW.shape))


def main() -> int:
    """Print a line a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2000, 5000, 10000, 20000])
    parser.add_argument("--window", type=int, default=224)
    parser.add_argument("--width", type=int, default=192, help="channels of the module (default 192)")
    parser.add_argument("--overlap", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=4, help="MONAI's crops at once (default 4)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(_mapped(options, *options.run)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for size in options.sizes:
            _write_scene(Path(folder) / "scene.tif", size)
            found = {way: _in_a_process(folder, way) for way in options.ways}
            print(json.dumps({"size": size, **found, "agree": _agreement(Path(folder), options.ways)}), flush=True)
    return 0


def _in_a_process(folder: str, way: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.maps.crops", *sys.argv[1:], "--run", folder, way]
    found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def _mapped(options: argparse.Namespace, folder: str, way: str) -> dict[str, float]:
    """Map the scene in this process; return seconds, by the clock and of the processor, and MiB of memory."""
    torch.manual_seed(0)
    module, image = PatchMixer(options.window, options.width).eval(), Path(folder) / "scene.tif"
    if way == "monai":
        from monai.inferers import sliding_window_inference
    else:
        import_module("tiledseg.inference.predictor")
    before, begun, worked = _peak(), time.perf_counter(), time.process_time()
    output = Path(folder) / f"{way}.tif"
    if way == "tiledseg":
        crops = {"window": options.window, "overlap": options.overlap, "blend": "gaussian"}
        tiledseg.predict_raster(module, image, output, format="gtiff", compress="none", **crops)
    else:
        with rasterio.open(image) as file, torch.inference_mode():
            x_BCHW = torch.from_numpy(file.read()).float()[None]
            side, overlap = (options.window,) * 2, options.overlap
            scores_BKHW = sliding_window_inference(x_BCHW, side, options.batch, module, overlap, mode="gaussian")
            with rasterio.open(output, "w", **file.profile | {"count": 1, "dtype": "uint8"}) as out:
                out.write(scores_BKHW[0].max(0).indices.to(torch.uint8).numpy(), 1)
    seconds, processor = time.perf_counter() - begun, time.process_time() - worked
    return {"seconds": round(seconds, 1), "processor_seconds": round(processor, 1), "MiB": round(_peak() - before)}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _agreement(folder: Path, ways: list[str]) -> float:
    """Return the share of pixels of one class in all maps, strip by strip."""
    files = [rasterio.open(folder / f"{way}.tif") for way in ways]
    strips = [rasterio.windows.Window(0, row, files[0].width, 512) for row in range(0, files[0].height, 512)]
    equal = 0
    for strip in strips:
        one, *others = (file.read(1, window=strip) for file in files)
        equal += int(np.all([one == other for other in others], axis=0).sum()) if others else one.size
    return round(equal / (files[0].height * files[0].width), 6)


def _write_scene(path: Path, size: int) -> None:
    draw = np.random.default_rng(1)
    options = {"driver": "GTiff", "tiled": True, "blockxsize": 512, "blockysize": 512, "count": BANDS}
    with rasterio.open(path, "w", height=size, width=size, dtype="uint8", **options) as file:
        for row in range(0, size, 512):
            rows = min(512, size - row)
            noise_CHW = draw.integers(0, 256, (BANDS, rows, size), np.uint8)
            file.write(noise_CHW, window=rasterio.windows.Window(0, row, size, rows))


if __name__ == "__main__":
    raise SystemExit(main())
