"""Training runs in every way to spread them, each held against the run of one rank: same losses, same weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.commands.options import to_yaml
from tiledseg.config.run import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TilingConfig,
)
from tiledseg.config.run import TrainConfig as Train
from tiledseg.training.start import start

STEPS = 4
CLASSES = 5
# fp32: sums in another order, kernels chosen for another size. bf16: 8 bits, rounded tile by tile.
BOUNDS = {"fp32": 1e-4, "bf16": 0.03}


@dataclass(frozen=True)
class Run:
    """What one rank can compute too: network and precision. Norms of the whole image need its one tile."""

    norm: str = "none"
    precision: str = "fp32"

    @property
    def name(self) -> str:
        return f"{self.precision}-{self.norm}"


@dataclass(frozen=True)
class Case:
    """A way to spread a run over `ranks` ranks; two images a step."""

    name: str
    ranks: int
    run: Run
    parallel: ParallelConfig


PLAIN, NORMED, HALF = Run(), Run("instance"), Run("instance", "bf16")
CASES = (
    *(Case(f"read, {n} ranks", n, PLAIN, ParallelConfig()) for n in (2, 4)),
    *(Case(f"exchange, {n} ranks", n, PLAIN, ParallelConfig(halo="exchange")) for n in (2, 4)),
    Case("layer, 1 x 2", 2, PLAIN, ParallelConfig(halo="layer", mesh=[1, 2])),
    Case("layer, 2 x 2", 4, PLAIN, ParallelConfig(halo="layer", mesh=[2, 2])),
    Case("2 stages", 2, PLAIN, ParallelConfig(stages=2, balance="modelled")),
    Case("4 stages", 4, PLAIN, ParallelConfig(stages=4, balance="modelled")),
    Case("2 stages x 2 replicas", 4, PLAIN, ParallelConfig(stages=2, balance="modelled")),
    Case("layer 2 x 1 with instance norm x 2 replicas", 4, NORMED, ParallelConfig(halo="layer", mesh=[2, 1])),
    Case("layer 1 x 2 with instance norm in bf16", 2, HALF, ParallelConfig(halo="layer", mesh=[1, 2])),
    Case("layer 2 x 1 with instance norm in bf16 x 2 replicas", 4, HALF, ParallelConfig(halo="layer", mesh=[2, 1])),
)


def config_of(run: Run, folder: Path, output: str, parallel: ParallelConfig | None, small: bool) -> Config:
    """`parallel` None: one rank, whole images."""
    names = [[str(folder / f"{what}-{i}.tif") for i in range(2)] for what in ("image", "labels")]
    levels, channels = (3, 4) if small else (4, 16)
    grid = 1 if parallel is None and run.norm != "none" else 2
    return Config(
        data=DataConfig(images=names[0], labels=names[1], classes=CLASSES, workers=1),
        tiling=TilingConfig(grid=[1, 1] if grid == 1 else _grid(parallel)),
        model=ModelConfig(levels=levels, base_channels=channels, norm=run.norm),
        parallel=parallel or ParallelConfig(),
        optimizer=OptimizerConfig(name="sgd", lr=0.01),
        train=Train(epochs=STEPS, images_per_step=2, precision=run.precision),
        run=RunConfig(output=str(folder / output), verbosity=0),
    )


def _grid(parallel: ParallelConfig | None) -> list[int]:
    """Tiles as the mesh has ranks, where it is given."""
    mesh = parallel.mesh if parallel is not None else "auto"
    return mesh if isinstance(mesh, list) else [2, 2]


def train(config: Config, mesh: Mesh) -> list[dict[str, Any]]:
    """A whole run, as the command does it; its steps, on rank 0. Collective."""
    mesh.on_root(lambda: shutil.rmtree(config.run.output, ignore_errors=True))
    code = start(config, to_yaml(config), mesh)
    if code:
        raise RuntimeError(f"the run ended with code {code}")
    if not mesh.is_root:
        return []
    lines = [json.loads(line) for line in (Path(config.run.output) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def compared(case: Case, steps: list[dict[str, Any]], folder: Path, output: str, mesh: Mesh) -> dict[str, Any]:
    """The steps beside those of one rank. Raises AssertionError where they differ by more than rounding."""
    lines = (folder / case.run.name / "metrics.jsonl").read_text().splitlines()
    alone = [line for line in map(json.loads, lines) if "loss" in line]
    losses = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(steps, alone, strict=True))
    weights = weights_differ(folder / output, folder / case.run.name)
    bound = BOUNDS[case.run.precision]
    if not max(losses, weights) <= bound:
        raise AssertionError(f"losses differ by {losses:.1e}, weights by {weights:.1e}, more than {bound:g}")
    keys = ("seconds", "communication_seconds", "halo_messages", "halo_bytes", "bubble_share", "stage_seconds")
    last = {key: steps[-1][key] for key in keys if key in steps[-1]}
    if last.get("halo_messages"):
        last["seconds_a_message"] = last["communication_seconds"] * case.ranks / last["halo_messages"]
    about = {"transport": mesh.transport, "device": str(mesh.device), "one_rank_seconds": alone[-1]["seconds"]}
    return {"losses_differ_by": losses, "weights_differ_by": weights, **about, **last}


def weights_differ(one: Path, other: Path) -> float:
    """|a - b| / |b| over all weights of two runs' last checkpoints, in the L2 norm."""
    from safetensors.torch import load_file

    mine, theirs = (load_file(find_checkpoint(str(folder)).path / "model.safetensors") for folder in (one, other))
    pairs = [(mine[name].double(), theirs[name].double()) for name in theirs if theirs[name].is_floating_point()]
    apart, length = (
        sum(float(x.square().sum()) for x in xs) for xs in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    return float((apart / length) ** 0.5)


def alone_on(device: torch.device) -> Mesh:
    """One rank."""
    from tiledseg.comm.collectives import Communicator
    from tiledseg.comm.launch import SERIAL

    return Mesh(SERIAL, Communicator(), device, "serial", "here")


def references(folder: Path, small: bool, device: torch.device) -> dict[str, float]:
    """Runs of one rank, for all cases to be held against; the seconds of their last steps."""
    runs = dict.fromkeys(case.run for case in CASES)
    return {
        run.name: train(config_of(run, folder, run.name, None, small), alone_on(device))[-1]["seconds"] for run in runs
    }
