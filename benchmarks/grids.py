"""Is the grid that `auto` takes the quickest? All grids side by side, for maps and for training steps.

    python -m tiledseg.plan --calibrate machine.yaml
    python -m benchmarks.grids machine.yaml [--map 4096] [--train 2048] [--grids 1 2 3 4 6 8] [--turns 1]

`map`: a forward pass over all tiles of a scene of noise, in a process of its own for each grid, since what a process
has touched before it need not touch again. `train`: the second step of as many. One thread. Seconds by the clock, with
what the cost model says, and which grid `auto` takes without a profile and with it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from benchmarks.launching import python, run_process
from benchmarks.spread import Spread, markdown
from tiledseg.architecture.unet import UNet
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.run.grids.quick_grid import predicted_seconds
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.user_files.machine import find_machine

LIMIT_SECONDS = 400
MEMORY = 12 << 30
NETWORKS = {"map": UNet(4, base_channels=12, classes=5), "train": UNet(5, base_channels=8, classes=5)}


def main() -> None:
    options = _parser().parse_args()
    if options.one:
        kind, side, rows, cols = options.one
        print(json.dumps(measure(kind, int(side), (int(rows), int(cols)))))
        return
    machine = Machine.known(find_machine(options.machine))
    for kind, side in (("map", options.map), ("train", options.train)):
        if side:
            print(table(kind, side, options.grids, options.turns, machine), end="\n\n")


def table(kind: str, side: int, counts: list[int], turns: int, machine: Machine) -> str:
    """A row a grid, quickest first in no order but that of the grids."""
    network, footprint = NETWORKS[kind], network_footprint(NETWORKS[kind].graph())
    trains = kind == "train"

    def auto(known: Machine | None) -> tuple[int, int]:
        question = RunQuestion(network, (Extent((side, side)),), 1, MEMORY, machine=known, trains=trains)
        return plan_run(question).tilings[0].grid

    fewest, chosen = auto(None), auto(machine)
    grids = sorted({(count, count) for count in counts} | {fewest, chosen}, key=lambda grid: grid[0] * grid[1])
    found: dict[tuple[int, int], list[float]] = {grid: [] for grid in grids}
    for turn in range(turns):
        for grid in grids[:: -1 if turn % 2 else 1]:
            found[grid].append(_in_process(kind, side, grid)["seconds"])
    least = min(min(values) for values in found.values())
    prices = Prices(network.graph(), network.bands, 4, machine)
    rows = []
    for grid, values in found.items():
        said = predicted_seconds(make_tiling((side, side), grid, footprint), prices, trains)
        words = ["auto" * (grid == fewest), "auto with the profile" * (grid == chosen)]
        spread = Spread.of(values)
        rows.append(
            (
                f"{grid[0]} x {grid[1]}",
                spread,
                f"{spread.least / least:.2f}",
                f"{said:.3g}",
                ", ".join(filter(None, words)),
            )
        )
    return f"{kind}, {side} px\n\n" + markdown(("grid", "seconds", "over the best", "predicted", ""), rows)


def _in_process(kind: str, side: int, grid: tuple[int, int]) -> dict[str, Any]:
    words = [kind, str(side), *map(str, grid)]
    done = run_process(python("benchmarks.grids", "-", "--one", *words), LIMIT_SECONDS)
    if done.code:
        sys.exit(f"{' '.join(words)}: {done.reason}")
    found: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    return found


def measure(kind: str, side: int, grid: tuple[int, int]) -> dict[str, float]:
    """Seconds of this process for a map, or for a training step after a first one."""
    import os

    import torch

    from tiledseg.execution.precision import make_deterministic
    from tiledseg.system.freed_memory import keep_freed_memory

    keep_freed_memory(os.environ)
    torch.set_num_threads(1)
    make_deterministic(True)
    network = NETWORKS[kind]
    tiling = make_tiling((side, side), grid, network_footprint(network.graph()))
    return {"seconds": (_step if kind == "train" else _map)(network, tiling)}


def _map(network: UNet, tiling: Tiling) -> float:
    import torch

    from tiledseg.models.network import build_modules

    passes, samples, parts = _passes(build_modules(network, 0).eval(), tiling)
    begun = time.perf_counter()
    with torch.no_grad():
        for _, piece in passes.outputs(iter(samples), parts):
            piece.logits_BKHW.argmax(1)
    return time.perf_counter() - begun


def _step(network: UNet, tiling: Tiling) -> float:
    import torch

    from tiledseg.comm.axes import serial_axes
    from tiledseg.models.network import build_modules
    from tiledseg.training.steps.step import Stepper, StepRules

    module = build_modules(network, 0).train()
    passes, samples, parts = _passes(module, tiling)
    mesh = passes.mode.mesh
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, foreach=True)
    stepper = Stepper(optimizer, mesh, passes, serial_axes(mesh.communicator), StepRules(255, 0))
    for _ in range(2):
        begun = time.perf_counter()
        stepper.run(0, iter(samples), parts, stop=False)
        seconds = time.perf_counter() - begun
    return seconds


def _passes(module: Any, tiling: Tiling) -> tuple[Any, Any, Any]:
    import numpy as np
    import torch

    from tiledseg.comm.launch import SERIAL
    from tiledseg.comm.mesh import Mesh
    from tiledseg.comm.transports.collectives import SerialCommunicator
    from tiledseg.execution.halos.halo_modes import ReadMode
    from tiledseg.execution.halos.part import Part
    from tiledseg.execution.passes.part_passes import SerialPasses
    from tiledseg.raster.samples.dataset import Sample

    module.to(memory_format=torch.channels_last)
    mesh = Mesh(SERIAL, SerialCommunicator(), torch.device("cpu"), "serial", "here")
    passes = SerialPasses(ReadMode(module, mesh, (tiling,), "fp32"))
    parts = [Part(0, tile) for tile in tiling.tiles]
    draw = np.random.default_rng(0)
    whole_CHW = draw.random((4, *tiling.raster), np.float32)
    samples = [
        Sample(
            0, t, whole_CHW[:, *t.context.slices].copy(), np.zeros(t.core.shape, np.uint8), np.ones(t.core.shape, bool)
        )
        for t in tiling.tiles
    ]
    return passes, samples, parts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine")
    parser.add_argument("--map", type=int, default=4096, help="side of the scene that is mapped, px; 0 for none")
    parser.add_argument("--train", type=int, default=2048, help="side of the image that is trained on, px; 0 for none")
    parser.add_argument("--grids", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
