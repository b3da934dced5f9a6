"""A map of one scene by each way, in a process each: FOLDER prepare, then FOLDER WAY.

`prepare` writes a scene, trains a small U-Net for some steps, and maps the scene as one image. A way maps from file to
file; imports are not timed. Ways `of crops` take a network of one input size (patches, attention)."""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
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

BANDS, CLASSES, SIDE, CROP = 4, 5, 1536, 224
OURS, CROPS = "tiledseg", "tiledseg, of crops"
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


def base_of(way: str) -> str:
    """Return our way of the same work."""
    return CROPS if "crops" in way else OURS


def module_of(way: str, folder: Path) -> nn.Module:
    torch.manual_seed(0)
    if "crops" in way:
        side, block = CROP // 16, nn.TransformerEncoderLayer((CROP // 16) ** 2, 4, 768, batch_first=True)
        mixer = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
        tokens = nn.Flatten(2), mixer, nn.Unflatten(2, (side, side))
        patches = nn.Conv2d(BANDS, 192, 16, 16), *tokens, nn.ConvTranspose2d(192, CLASSES, 16, 16)
        return nn.Sequential(nn.BatchNorm2d(BANDS), *patches).eval()
    module = nn.Sequential(nn.BatchNorm2d(BANDS), unet(16, BANDS, CLASSES))  # which learns the scale of the values
    if (folder / "unet.pt").exists():
        module.load_state_dict(torch.load(folder / "unet.pt"))
    return module.eval()


def prepare(folder: Path) -> None:
    """Write the scene, a small one to learn from, the network's weights, and the map of the undivided scene."""
    for name, size in (("scene", SIDE), ("small", 512)):
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
    tiledseg.predict_raster(module, image, output, format="gtiff", **options)


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
    """Load a file of terratorch with empty packages around it: its own import torchvision."""
    for name in ("terratorch", "terratorch.models", "terratorch.tasks", "terratorch.registry"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(FOLDER / name.replace(".", "/"))]
    vars(package)["BACKBONE_REGISTRY"] = {}
    with stand_ins():
        import_module("terratorch.tasks.tiled_inference")


def mapped(folder: Path, way: str) -> dict[str, Any]:
    """Map the scene in this way."""
    module, image, output = module_of(way, folder), folder / "scene.tif", folder / "map.tif"
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
    folder, way = Path(sys.argv[1]), sys.argv[2]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if way == "prepare":
        prepare(folder)
    else:
        print(json.dumps(mapped(folder, way)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
