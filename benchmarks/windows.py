"""Steps of small windows under a batch norm over the step, beside plain torch's: megapixels a second of processor time.

    OMP_NUM_THREADS=1 python -m benchmarks.windows --side 128 --windows 8 --batches 1 2 4 8 --repeat 9

The network at half size of `benchmarks.naip_trees` (or, with --width and --levels, another of its kind), 4 bands, 2
classes, AdamW, cross-entropy with weights. Ours: `train.window_halo: none` in mode layer on one rank, as many windows
at once as --batches says. Plain torch: the same network, channels last, all windows as one batch. Steps by turns.
The largest batch runs once more with torch's own batch norm, which sums in float32, in the place of ours: what float64
costs. Prints a line of JSON: the rate of each, and the median and the quartiles of the ratio of its time to plain
torch's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from benchmarks.naip_trees.network import build
from tiledseg.architecture.foreign import ForeignNetwork
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.precision import autocast, make_deterministic
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.geometry.tiling import make_tiling
from tiledseg.planning.run.spread import Spread
from tiledseg.raster.samples.dataset import Sample
from tiledseg.raster.tile_reference import TileReference
from tiledseg.system.freed_memory import keep_freed_memory
from tiledseg.tracing.build import known, network_modules
from tiledseg.training.losses.objective import ClassObjective
from tiledseg.training.steps.step import Stepper, StepRules

BANDS, CLASSES, IGNORED = 4, 2, 255
WEIGHTS = (1.0, 4.0)
PLAIN = "plain torch"
Step = Callable[[], object]


def ours(width: int, levels: int, samples_of: list[tuple[np.ndarray, np.ndarray]], precision: str, batch: int) -> Step:
    """A step of the windows, `batch` of them at once."""
    network = known(
        ForeignNetwork.of("benchmarks.naip_trees.network:build", {"width": width, "levels": levels}, BANDS, CLASSES)
    )
    side = samples_of[0][1].shape[0]
    tiling = make_tiling((side, side), (1, 1), network_footprint(network.graph()))
    mesh = Mesh(SERIAL, SerialCommunicator(), torch.device("cpu"), "serial", "here")
    spread = Spread("layer", MeshShape(1, 1, 1), together=True)
    run = ParallelRun.open(spread, network_modules(network, seed=0).train(), mesh, precision)
    optimizer = torch.optim.AdamW(run.network.parameters(), lr=1e-3, foreach=True)
    passes = run.over([tiling] * len(samples_of), batch)
    rules = StepRules(IGNORED, 0, objective=ClassObjective(IGNORED, weights=WEIGHTS))
    stepper = Stepper(optimizer, mesh, passes, run.axes, rules)
    seen = np.ones((side, side), bool)
    samples = [Sample(i, tiling.tiles[0], x_CHW, y_HW, seen) for i, (x_CHW, y_HW) in enumerate(samples_of)]
    parts = passes.mode.share([TileReference(i, 0) for i in range(len(samples))])
    order = [samples[part.image] for part in parts]
    return lambda: stepper.run(0, (replace(sample) for sample in order), parts, stop=False)


def plain(width: int, levels: int, samples_of: list[tuple[np.ndarray, np.ndarray]], precision: str) -> Step:
    """As one writes it."""
    torch.manual_seed(0)
    network = build(BANDS, CLASSES, width, levels).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, foreach=True)
    weight_K = torch.tensor(WEIGHTS)

    def step() -> None:
        x_BCHW, y_BHW = (torch.from_numpy(np.stack(each)) for each in zip(*samples_of, strict=True))
        with autocast(precision, torch.device("cpu")):
            logits_BKHW = network(x_BCHW.contiguous(memory_format=torch.channels_last))
        loss = nn.functional.cross_entropy(logits_BKHW.float(), y_BHW.long(), weight_K, ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def with_torchs_norm(step: Step) -> Step:
    """The step, its batch norms torch's."""

    def normed(norm: nn.BatchNorm2d, blocks: Sequence[tuple[torch.Tensor, Any]], *_: Any) -> tuple[torch.Tensor, ...]:
        kept = norm.running_mean, norm.running_var, norm.weight.float(), norm.bias.float()
        return tuple(nn.functional.batch_norm(x_BCHW, *kept, True, 0.1, norm.eps) for x_BCHW, _ in blocks)

    def run() -> None:
        with patch("tiledseg.spatial.norm.normed_together", normed):
            step()

    return run


def by_turns(steps: dict[str, Step], count: int) -> dict[str, list[float]]:
    """Seconds of the processor that each step takes."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(count):
        for name, step in steps.items():
            begun = _used()
            step()
            found[name].append(_used() - begun)
    return found


def _used() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--repeat", type=int, default=9)
    flags = parser.parse_args()
    keep_freed_memory(os.environ)
    make_deterministic(True)
    draw = np.random.default_rng(0)
    shape = flags.side, flags.side
    windows = [
        (draw.normal(size=(BANDS, *shape)).astype(np.float32), draw.integers(0, CLASSES, shape).astype(np.uint8))
        for _ in range(flags.windows)
    ]
    given = flags.width, flags.levels, windows, flags.precision
    steps = {str(batch): ours(*given, batch) for batch in flags.batches}
    steps["torch's norm"] = with_torchs_norm(steps[str(max(flags.batches))])
    steps[PLAIN] = plain(*given)
    by_turns(steps, 2)
    seconds = by_turns(steps, flags.repeat)
    pixels = flags.windows * flags.side**2
    line = {
        "side": flags.side,
        "windows": flags.windows,
        "precision": flags.precision,
        "Mpx/s": {name: round(pixels / statistics.median(found) / 1e6, 3) for name, found in seconds.items()},
        "ratios": {name: _quartiles(found, seconds[PLAIN]) for name, found in seconds.items() if name != PLAIN},
    }
    print(json.dumps(line))


def _quartiles(found: list[float], ones: list[float]) -> list[float]:
    lower, median, upper = statistics.quantiles([a / b for a, b in zip(found, ones, strict=True)], n=4)
    return [round(value, 3) for value in (median, lower, upper)]


if __name__ == "__main__":
    main()
