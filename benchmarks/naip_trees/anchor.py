"""The anchor: MONAI's BasicUNet in a plain loop, as one would write it without this project.

    python -m benchmarks.naip_trees.anchor JOB.json

Random crops of 256 px, flips, quarter turns, jitter of each band's brightness and contrast, trees weigh 4, AdamW with
a cosine policy, batch norm, 16 channels at full size. `benchmarks.naip_trees --beside` runs it: a row's run trains at
the same time, and the anchor for as long as that does. How far the other is tells how far the cosine is, so both end
their policies at the same second, whatever else the machine does.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import torch
import yaml
from numpy.typing import NDArray

from benchmarks.naip_trees.cities import BANDS, LEARNT, OTHER, image_of, iou, labels_of, one_band, parts_of
from benchmarks.naip_trees.runs import HELD_OUT, SECONDS
from tiledseg.geometry.box import Box

WIDTHS = (16, 16, 32, 64, 128, 16)
CROPS, RATE, WARM_UP, TREE_WEIGHT = 4, 0.003, 20, 4.0
IGNORED = -100


@dataclass(frozen=True)
class Job:
    """`config`: that of the run beside which it trains, whose folder is `other`, and which takes so many `steps`; maps
    go to `folder`."""

    data: str
    config: str
    other: str
    steps: int
    seed: int
    folder: str
    side: int

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def run(job: Job) -> dict[str, Any]:
    """Trains until the run beside it is done, then maps both cities."""
    torch.manual_seed(job.seed)
    torch.set_num_threads(1)
    data = Path(job.data)
    told = yaml.safe_load(Path(job.config).read_text())["data"]
    image_CHW, labels_HW = read(image_of(data, LEARNT)), one_band(labels_of(data, LEARNT))
    trained, held_out = (part.inside(Box.of_shape(labels_HW.shape)) for part in parts_of(told, labels_HW.shape))
    mean_C, std_C = ([float(of(band[trained])) for band in image_CHW] for of in (np.mean, np.std))
    x_CHW = normalised(image_CHW, mean_C, std_C)
    network = build()
    begun = time.perf_counter()
    steps = train(network, x_CHW, np.where(trained, labels_HW.astype(np.int64), IGNORED), job)
    seconds = time.perf_counter() - begun
    network.eval()
    maps = {LEARNT: predicted(network, x_CHW)}
    maps[OTHER] = predicted(network, normalised(read(image_of(data, OTHER)), mean_C, std_C))
    for city, map_HW in maps.items():
        np.save(Path(job.folder) / f"anchor_{city}.npy", map_HW)
    return {
        HELD_OUT: iou(maps[LEARNT][held_out], labels_HW[held_out]),
        "steps": steps,
        "parameters": sum(each.numel() for each in network.parameters()),
        SECONDS: round(seconds, 1),
        "pixels": steps * CROPS * job.side**2,
    }


def build() -> torch.nn.Module:
    nets = importlib.import_module("monai.networks.nets")
    made: torch.nn.Module = nets.BasicUNet(2, len(BANDS), 2, features=WIDTHS, norm="batch")
    return made


def progress(job: Job) -> float:
    """How far the run beside it is, from 0 to 1: by the lines of its metrics."""
    lines = Path(job.other) / "metrics.jsonl"
    text = lines.read_text() if lines.exists() else ""
    return min(text.count('"lr"') / job.steps, 1.0)


def train(network: torch.nn.Module, x_CHW: NDArray[np.float32], labels_HW: NDArray[np.int64], job: Job) -> int:
    """Steps until the run beside it is done; their number."""
    generator = np.random.default_rng(job.seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    weight_K = torch.tensor([1.0, TREE_WEIGHT])
    network.train()
    steps = 0
    while (share := progress(job)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (steps + 1) / WARM_UP) * (1 + math.cos(math.pi * share)) / 2
        crops = [crop(x_CHW, labels_HW, job.side, generator) for _ in range(CROPS)]
        x_BCHW, labels_BHW = (torch.from_numpy(np.stack(each)) for each in zip(*crops, strict=True))
        loss = torch.nn.functional.cross_entropy(network(x_BCHW), labels_BHW, weight_K, ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    return steps


def crop(
    x_CHW: NDArray[np.float32], labels_HW: NDArray[np.int64], side: int, generator: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """One random window, as drawn: flipped, turned, in another light."""
    row, col = (int(generator.integers(size - side + 1)) for size in labels_HW.shape)
    x_CHW = x_CHW[:, row : row + side, col : col + side]
    labels_HW = labels_HW[row : row + side, col : col + side]
    for dim in (-1, -2):
        if generator.random() < 0.5:
            x_CHW, labels_HW = np.flip(x_CHW, dim), np.flip(labels_HW, dim)
    turns = int(generator.integers(4))
    x_CHW, labels_HW = np.rot90(x_CHW, turns, (-2, -1)), np.rot90(labels_HW, turns)
    factors, offsets = (generator.uniform(-0.2, 0.2, (len(x_CHW), 1, 1)).astype(np.float32) for _ in range(2))
    return np.ascontiguousarray(x_CHW * (1 + factors) + offsets), np.ascontiguousarray(labels_HW)


def predicted(network: torch.nn.Module, x_CHW: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The class map of a whole image at once: sides are multiples of 16."""
    with torch.inference_mode():
        return network(torch.from_numpy(x_CHW)[None]).argmax(1)[0].numpy().astype(np.uint8)


def normalised(image_CHW: NDArray[Any], mean_C: list[float], std_C: list[float]) -> NDArray[np.float32]:
    pairs = zip(image_CHW, mean_C, std_C, strict=True)
    return np.stack([((band - mean) / std).astype(np.float32) for band, mean, std in pairs])


def read(path: Path) -> NDArray[Any]:
    """All bands of an image, (C, height, width)."""
    with rasterio.open(path) as file:
        pixels_CHW: NDArray[Any] = file.read(BANDS)
    return pixels_CHW


if __name__ == "__main__":
    print(json.dumps(run(Job(**json.loads(Path(sys.argv[1]).read_text())))))
