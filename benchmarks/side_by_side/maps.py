"""A map of one scene by each way, in a process each: FOLDER prepare SIDE, then FOLDER WAY.

`prepare` writes a scene and one twice as large, trains a small U-Net for some steps, and maps the scene as one image. A
way maps from file to file; imports are not timed. Ways `of crops` take a module of one input size (`PatchMixer`)."""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import rasterio
import torch
from torch import nn
from torch.nn import functional

import tiledseg
from benchmarks.side_by_side.layers import unet
from benchmarks.side_by_side.peers import FOLDER
from benchmarks.stand_ins import stand_ins

BANDS, CLASSES, CROP = 4, 5, 224
OURS, CROPS, TWICE = "tiledseg", "tiledseg, of crops", ", twice the side"
WAYS: dict[str, dict[str, Any]] = {
    OURS: {},
    "tiledseg, without `verify`": {"verify": False},
    "tiledseg, without `verify`, `grid=4`": {"verify": False, "grid": 4},
    "MONAI, windows of 512": {"roi_size": (512, 512), "overlap": 0.25},
    "MONAI, half overlapping, gaussian": {"roi_size": (512, 512), "overlap": 0.5, "mode": "gaussian"},
    "terratorch, windows of 512": {"crop": 512, "stride": 384, "delta": 8},
    CROPS: {"window": CROP, "overlap": 0.25, "blend": "gaussian"},
    "MONAI, of crops": {"roi_size": (CROP, CROP), "overlap": 0.25, "mode": "gaussian"},
    "terratorch, of crops": {"crop": CROP, "stride": 168, "delta": 0},
}
WAYS |= {f"{way}{TWICE}": WAYS[way] for way in (CROPS, "MONAI, of crops")}


def base_of(way: str) -> str:
    """Return our way of the same work."""
    return (CROPS if "crops" in way else OURS) + (TWICE if way.endswith(TWICE) else "")


class PatchMixer(nn.Module):
    """A module of one input size: patches with learned places, mixed by four blocks of attention."""

    def __init__(self, side: int = CROP, width: int = 192) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(BANDS, width, 16, 16), nn.Parameter(torch.randn((side // 16) ** 2, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.mixer = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
        self.head = nn.ConvTranspose2d(width, CLASSES, 16, 16)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        x_BCHW = self.patches(x_BCHW)
        mixed = self.mixer(x_BCHW.flatten(2).transpose(1, 2) + self.places)
        y_BKHW: torch.Tensor = self.head(mixed.transpose(1, 2).reshape(x_BCHW.shape))
        return y_BKHW


def module_of(way: str, folder: Path) -> nn.Module:
    torch.manual_seed(0)
    network = PatchMixer() if "crops" in way else unet(16, BANDS, CLASSES)
    module = nn.Sequential(nn.BatchNorm2d(BANDS), network)  # which learns the scale of the file's values
    if "crops" not in way and (folder / "unet.pt").exists():
        module.load_state_dict(torch.load(folder / "unet.pt"))
    return module.eval()


def prepare(folder: Path, side: int) -> None:
    """Write the scene, a small one to learn from, the network's weights, and the map of the undivided scene."""
    for name, size in (("scene", side), ("small", 512), ("twice", 2 * side)):
        tiledseg.write_scene(folder / f"{name}.tif", folder / f"{name}-labels.tif", size=(size, size), seed=len(name))
    names = ("small", "small-labels", "scene")
    x_CHW, y_HW, scene_CHW = (torch.from_numpy(rasterio.open(folder / f"{name}.tif").read()) for name in names)
    module = module_of(OURS, folder).train()
    optimizer = torch.optim.Adam(module.parameters(), 0.002)
    draw = np.random.default_rng(0)
    for _ in range(60):
        at = tuple(slice(first, first + 128) for first in draw.integers(0, 384, 2))
        loss = functional.cross_entropy(module(x_CHW[None, :, *at].float()), y_HW[0][at].long()[None], ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(module.state_dict(), folder / "unet.pt")
    with torch.inference_mode():
        scores_BKHW = module.eval()(scene_CHW[None].float())
    np.save(folder / "whole.npy", scores_BKHW[0].argmax(0).to(torch.uint8).numpy())


def by_tiledseg(module: nn.Module, image: Path, output: Path, options: dict[str, Any]) -> None:
    tiledseg.predict_raster(module, image, output, format="gtiff", compress="none", **options)


def _of_image(image: Path, output: Path, scores_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with rasterio.open(image) as file, torch.inference_mode():
        scores_BKHW = scores_of(torch.from_numpy(file.read()).float()[None])
        with rasterio.open(output, "w", **file.profile | {"count": 1, "dtype": "uint8", "nodata": None}) as out:
            out.write(scores_BKHW[0].max(0).indices.to(torch.uint8).numpy(), 1)


def by_monai(module: nn.Module, image: Path, output: Path, options: dict[str, Any]) -> None:
    window = import_module("monai.inferers").sliding_window_inference
    _of_image(image, output, lambda x_BCHW: window(x_BCHW, predictor=module, sw_batch_size=4, **options))


def by_terratorch(module: nn.Module, image: Path, output: Path, options: dict[str, Any]) -> None:
    tiled = sys.modules["terratorch.tasks.tiled_inference"].tiled_inference
    _of_image(image, output, lambda x_BCHW: tiled(module, x_BCHW, batch_size=4, **options))


def load_terratorch() -> None:
    """Load two files of terratorch by themselves: its package imports torchvision."""
    for name in ("terratorch", "terratorch.models", "terratorch.registry"):
        sys.modules[name] = ModuleType(name)
    vars(sys.modules["terratorch.registry"])["BACKBONE_REGISTRY"] = {}
    with stand_ins():
        for name in ("terratorch.models.utils", "terratorch.tasks.tiled_inference"):
            spec = util.spec_from_file_location(name, FOLDER / f"{name.replace('.', '/')}.py")
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])


def mapped(folder: Path, way: str) -> dict[str, Any]:
    """Map the scene in this way."""
    module, output = module_of(way, folder), folder / "map.tif"
    image = folder / ("twice.tif" if way.endswith(TWICE) else "scene.tif")
    if way.startswith("terratorch"):
        load_terratorch()
    import_module("monai.inferers" if way.startswith("MONAI") else "tiledseg.inference.predictor")
    by = {"M": by_monai, "t": by_terratorch if way.startswith("terra") else by_tiledseg}[way[0]]
    before, begun, worked = _peak(), time.perf_counter(), time.process_time()
    by(module, image, output, WAYS[way])
    found = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - worked, "MiB": _peak() - before}
    with rasterio.open(image) as file, rasterio.open(output) as made:
        valid_HW, map_HW = file.dataset_mask() > 0, made.read(1)
    wrong = None if "crops" in way else int((map_HW != np.load(folder / "whole.npy"))[valid_HW].sum())
    return {**{key: round(value, 2) for key, value in found.items()}, "wrong": wrong, "pixels": map_HW.size}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    folder, way, *more = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if way == "prepare":
        prepare(Path(folder), int(more[0]))
    else:
        print(json.dumps(mapped(Path(folder), way)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
