"""What several tiles at once save: the time of a training step with 1 and with N tiles of one shape in a batch.

    OMP_NUM_THREADS=1 python -m benchmarks.batches --sides 32 64 128 256 --batches 2 4 8 --repeat 7

A U-Net (or, by --model, another network of --base-channels) on as many tiles as the largest batch, each of so many
pixels a side, halo included, fp32, AdamW; steps by turns. Prints a line of JSON a side: seconds of a step one by one,
and the ratio to it (median, lower and upper quartile) of each batch; below 1, the batch is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from benchmarks.frozen_encoder import by_turns
from tiledseg.architecture.network import Network
from tiledseg.architecture.presets import build_network
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.config.run import ModelConfig
from tiledseg.execution.halos.part import Part
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.precision import make_deterministic
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.models.network import build_modules
from tiledseg.planning.run.spread import Spread
from tiledseg.raster.samples.dataset import Sample
from tiledseg.system.freed_memory import keep_freed_memory
from tiledseg.training.steps.step import Stepper, StepRules

IGNORED = 255


def stepping(network: Network, side: int, tiles: int, batch: int, device: torch.device) -> Callable[[], None]:
    """A training step of so many tiles, `batch` of them at once."""
    tiling = make_tiling((side, side), (1, 1), network_footprint(network.graph()))
    mesh = Mesh(SERIAL, SerialCommunicator(), device, "serial", "here")
    run = ParallelRun.open(Spread(), build_modules(network, seed=0).train(), mesh, "fp32")
    optimizer = torch.optim.AdamW(run.network.parameters(), foreach=True)
    passes = run.over([tiling] * tiles, batch)
    stepper = Stepper(optimizer, mesh, passes, run.axes, StepRules(IGNORED, 0))
    draw = np.random.default_rng(0)
    x_CHW = draw.normal(size=(network.bands, side, side)).astype(np.float32)
    labels_HW = draw.integers(0, network.classes, (side, side)).astype(np.uint8)
    sample = Sample(0, tiling.tiles[0], x_CHW, labels_HW, np.ones((side, side), bool))
    samples = [replace(sample, image=image) for image in range(tiles)]
    parts = [Part(image, sample.tile) for image in range(tiles)]

    def step() -> None:
        stepper.run(0, iter(samples), parts, stop=False)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=int, nargs="+", default=[32, 64, 128, 256], help="px, halo included")
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--model", default="unet")
    parser.add_argument("--levels", type=int, default=None, help="of a U-Net or SegNet")
    parser.add_argument("--base-channels", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    flags = parser.parse_args()
    keep_freed_memory(os.environ)
    make_deterministic(True)
    levels = {} if flags.levels is None else {"levels": flags.levels}
    norm = "none" if flags.model == "unet" else "instance"
    network = build_network(ModelConfig(flags.model, base_channels=flags.base_channels, norm=norm, **levels), 4, 5)
    for side in flags.sides:
        tiles, device = max(flags.batches), torch.device(flags.device)
        steps = {str(batch): stepping(network, side, tiles, batch, device) for batch in (1, *flags.batches)}
        by_turns(steps, 2)
        seconds = by_turns(steps, flags.repeat)
        ratios = {name: _quartiles(found, seconds["1"]) for name, found in seconds.items() if name != "1"}
        print(json.dumps({"side": side, "tiles": tiles, "seconds": statistics.median(seconds["1"]), "ratios": ratios}))


def _quartiles(found: list[float], ones: list[float]) -> list[float]:
    """Median, lower and upper quartile of the ratios."""
    lower, median, upper = statistics.quantiles([a / b for a, b in zip(found, ones, strict=True)], n=4)
    return [round(value, 3) for value in (median, lower, upper)]


if __name__ == "__main__":
    main()
