"""The loop that a user would write, in a process of its own. `python -m benchmarks.training` starts it.

python -m benchmarks.training.plain JOB
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import rasterio
import torch
from rasterio.windows import Window
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.training.job import END, IGNORED, MEAN, STD, Job, measured
from tiledseg.freed_memory import keep_freed_memory
from tiledseg.geometry.box import Box
from tiledseg.geometry.tiling import Tiling
from tiledseg.models.network import build_modules


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


def _window(box: Box) -> Window:
    return Window(box.col.start, box.row.start, box.width, box.height)


def epoch(network: torch.nn.Module, job: Job) -> float:
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
    network = build_modules(job.network, 0)
    if job.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
    print("ready", flush=True)
    while sys.stdin.readline() != END:
        print(json.dumps(measured(lambda: epoch(network, job))), flush=True)


if __name__ == "__main__":
    main()
