"""Predicted against measured seconds of training steps, by a profile of this very machine.

    python -m tiledseg.plan --calibrate machine.yaml
    python -m benchmarks.cost_model machine.yaml
    mpirun -n 2 python -m benchmarks.cost_model machine.yaml      # the runs of two ranks

Each run is a training of its own, of which the quickest step but the first counts. No network is one that the
calibration trains.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.spread import markdown
from tiledseg.comm.session import leave, run_on_mesh
from tiledseg.commands.options import parse_config, to_yaml
from tiledseg.config.parallel import HALO_MODES
from tiledseg.planning.run.plan import plan_run
from tiledseg.user_files.machine import find_machine

if TYPE_CHECKING:
    from tiledseg.comm.mesh import Mesh
    from tiledseg.config.run import Config
    from tiledseg.planning.walk.cost_model import Machine

STEPS = 6
_MEMORY = 8 << 30


class Case(NamedTuple):
    """A training run: ranks, the side of its image in pixels, levels and channels of its U-Net, and further keys."""

    ranks: int
    side: int
    levels: int
    channels: int
    keys: dict[str, str]

    @property
    def name(self) -> str:
        keys = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in self.keys.items())
        return f"L{self.levels} c{self.channels}, {self.side} px, {keys}"

    def config(self, image: str, labels: str, output: str) -> Config:
        data = {"data.images": image, "data.labels": labels, "data.classes": "5", "run.output": output}
        model = {"model.levels": self.levels, "model.base_channels": self.channels, "run.verbosity": 0}
        keys = data | model | {"train.epochs": STEPS, "train.checkpoint_every": STEPS} | self.keys
        return parse_config([f"--{key}={value}" for key, value in keys.items()], "", "")


def cases(ranks: int) -> Iterator[Case]:
    """Yield the runs on so many ranks: of one over networks, norms, precisions and grids, else over halo modes."""
    if ranks > 1:
        for (levels, channels, side), halo in product(((3, 24, 512), (4, 16, 512), (3, 12, 640)), HALO_MODES):
            mesh = {} if halo == "read" else {"parallel.mesh": f"[{ranks},1]"}
            yield Case(ranks, side, levels, channels, {"tiling.grid": "2", "parallel.halo": halo} | mesh)
        return
    networks = (3, 12, 640), (3, 24, 512), (4, 8, 768), (4, 16, 512), (5, 8, 768), (4, 32, 256)
    for (levels, channels, side), grid in product(networks, (1, 2, 4)):
        yield Case(1, side, levels, channels, {"tiling.grid": str(grid)})
    for key, value in (
        *(("model.norm", "pixel"), ("model.norm", "instance"), ("model.upsampling", "nearest")),
        *(("model.upsampling", "bilinear"), ("train.precision", "bf16"), ("train.precision", "fp64")),
    ):
        yield Case(1, 384, 4, 12, {"tiling.grid": "1", key: value})


def main() -> int:
    machine, rows = find_machine(sys.argv[1]), []

    def body(mesh: Mesh) -> None:
        for case in cases(mesh.size):
            seconds = measured_and_predicted(case, machine, mesh)
            rows.append((case.name, *seconds, seconds[1] / seconds[0] - 1))
        if mesh.is_root:
            print(report(rows))

    return run_on_mesh(body)


def measured_and_predicted(case: Case, machine: Machine, mesh: Mesh) -> tuple[float, float]:
    """Train a case: seconds of a step. Collective."""
    from tiledseg.commands.calibrate import write_rasters
    from tiledseg.training.preparation import Preparation
    from tiledseg.training.start import start

    folder = mesh.on_root(tempfile.mkdtemp)
    output = f"{folder}/run"
    image, labels = mesh.on_root(lambda: write_rasters(Path(folder), case.side))
    config = case.config(image, labels, output)
    predicted = plan_run(replace(Preparation(config, _MEMORY, mesh.size).question, machine=machine)).seconds
    start(config, to_yaml(config), mesh)
    lines = [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    assert predicted is not None, "the machine has a profile"
    return min(line["seconds"] for line in lines[1:] if "seconds" in line), predicted


def report(rows: list[tuple[str, float, float, float]]) -> str:
    """Tables in markdown."""
    errors = sorted(abs(row[-1]) for row in rows)
    median, worst = f"{statistics.median(errors):.1%}", f"{errors[-1]:.1%}"
    figures = [("runs", len(rows)), ("median error", median), ("worst", worst)]
    lines = [(name, f"{there:.4f}", f"{said:.4f}", f"{error:+.1%}") for name, there, said, error in rows]
    head = ("run", "measured, s", "predicted, s", "error")
    return f"{markdown(('figure', 'value'), figures)}\n\n{markdown(head, lines)}"


if __name__ == "__main__":
    leave(main())
