"""The loop that a user would write, in a process of its own. `python -m benchmarks.training` starts it.

The network is of torch's own modules; it starts from the weights that ours starts from.

python -m benchmarks.training.plain JOB
"""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise

import numpy as np
import rasterio
import torch
from rasterio.windows import Window
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.training.job import BANDS, CLASSES, END, IGNORED, MEAN, STD, Job, measured
from tiledseg.geometry.box import Box
from tiledseg.geometry.tiling import Tiling
from tiledseg.models.network import build_modules
from tiledseg.system.freed_memory import keep_freed_memory


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


class Units(nn.Sequential):
    """The convolutions of a level."""

    def __init__(self, channels: int, out: int) -> None:
        parts = ((nn.Conv2d(c, out, 3, padding=1), nn.LeakyReLU(inplace=True)) for c in (channels, out))
        super().__init__(*(module for part in parts for module in part))


class PlainUNet(nn.Module):
    """What a user would write: torch's modules, two convolutions a level."""

    def __init__(self, levels: int, base: int, bands: int, classes: int) -> None:
        super().__init__()
        widths = [base << level for level in range(levels)]
        self.down = nn.ModuleList(Units(c, out) for c, out in pairwise([bands, *widths]))
        self.pool = nn.MaxPool2d(2)
        steps = list(pairwise(reversed(widths)))
        self.up = nn.ModuleList(
            nn.ModuleList((nn.ConvTranspose2d(c, out, 2, 2), Units(2 * out, out))) for c, out in steps
        )
        self.head = nn.Conv2d(base, classes, 1)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        skips = []
        for units in self.down[:-1]:
            skips.append(units(x_BCHW))
            x_BCHW = self.pool(skips[-1])
        x_BCHW = self.down[-1](x_BCHW)
        for step in self.up:
            up, units = step.children()
            x_BCHW = units(torch.cat([skips.pop(), up(x_BCHW)], 1))
        logits: torch.Tensor = self.head(x_BCHW)
        return logits


def plain_network(job: Job) -> PlainUNet:
    """With the weights of ours, which stand in the same order."""
    network = PlainUNet(job.levels, job.base_channels, BANDS, CLASSES)
    with torch.no_grad():
        for own, other in zip(network.parameters(), build_modules(job.network, 0).parameters(), strict=True):
            own.copy_(other)
    return network


def _window(box: Box) -> Window:
    return Window(box.col.start, box.row.start, box.width, box.height)


def epoch(network: nn.Module, job: Job) -> float:
    """The loss of one optimizer step over all tiles."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    optimizer.zero_grad()
    total, pixels = 0.0, 0
    tiles = PlainTiles(job.image, job.labels, job.tiling)
    for x_BCHW, y_BHW, inside in DataLoader(tiles, batch_size=1, num_workers=1):
        top, bottom, left, right = (int(v) for v in inside)
        if job.channels_last:
            x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
        logits = network(x_BCHW)[:, :, top:bottom, left:right]
        loss = functional.cross_entropy(logits, y_BHW, ignore_index=IGNORED, reduction="sum")
        loss.backward()
        total += loss.item()
        pixels += int((y_BHW != IGNORED).sum())
    for parameter in network.parameters():
        assert parameter.grad is not None
        parameter.grad /= pixels
    optimizer.step()
    return total / pixels


def main() -> None:
    job = Job.from_json(sys.argv[1])
    if job.kept:
        keep_freed_memory(os.environ)
    torch.set_num_threads(job.threads)
    network = plain_network(job)
    if job.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
    print("ready", flush=True)
    while sys.stdin.readline() != END:
        print(json.dumps(measured(lambda: epoch(network, job))), flush=True)


if __name__ == "__main__":
    main()
