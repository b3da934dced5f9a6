"""`predict` on a whole scene: pixels a second, and the share of the time in which the GPU computes."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.part import Part, begin_part
from benchmarks.gpu.shared_cases import alone_on
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.commands.options import to_yaml
from tiledseg.config.run import Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TilingConfig, TrainConfig
from tiledseg.execution.memory import memory_per_rank
from tiledseg.inference.predictor import predict_all
from tiledseg.inference.request import Request
from tiledseg.inference.trained import checkpoint_mapper
from tiledseg.scene import main as scene
from tiledseg.training.start import start


def main() -> int:
    part = begin_part(__file__)
    small = part.small or part.device.type == "cpu"
    work = part.work / "mapping"
    work.mkdir()
    side = 128 if small else 4096
    levels, channels = (3, 4) if small else (5, 64)
    part.measure(
        "network", "side of its scene", lambda: make_network(work, 64 if small else 256, levels, channels, part)
    )
    part.measure("scene", "side", lambda: make_scene(work, "large", side))
    for precision in ("fp32", "bf16"):
        for grid in (None, (2, 2), (4, 4)):
            name = f"{precision}, grid {grid[0] if grid else 'auto'}"
            part.measure(name, "Mpixel/s", partial(mapped, work, side, precision, grid, part), needs=4)
    return int(part.failed)


def make_scene(work: Path, name: str, side: int) -> int:
    """NAME.tif and NAME-labels.tif."""
    files = ["--image", str(work / f"{name}.tif"), "--labels", str(work / f"{name}-labels.tif")]
    if scene(["--size", str(side), str(side), *files]):
        raise RuntimeError("the scene could not be written")
    return side


def make_network(work: Path, side: int, levels: int, channels: int, part: Part) -> int:
    """One step on a small scene leaves a checkpoint."""
    make_scene(work, "train", side)
    config = Config(
        data=DataConfig(images=str(work / "train.tif"), labels=str(work / "train-labels.tif"), classes=5),
        tiling=TilingConfig(grid=1),
        model=ModelConfig(levels=levels, base_channels=channels),
        optimizer=OptimizerConfig(name="sgd", lr=0.001),
        run=RunConfig(output=str(work / "run"), verbosity=0),
    )
    if start(config, to_yaml(config), alone_on(part.device)):
        raise RuntimeError("the run failed")
    return side


def mapped(work: Path, side: int, precision: str, grid: tuple[int, int] | None, part: Part) -> dict[str, Any]:
    """A whole map by the predictor's own code; seconds that its kernels ran, as the profiler adds them up."""
    from torch.profiler import ProfilerActivity, profile

    mesh = alone_on(part.device)
    checkpoint = find_checkpoint(str(work / "run"))
    output = str(work / f"{precision}-{grid[0] if grid else 'auto'}.tif")
    tiling, train = TilingConfig(list(grid) if grid else "auto"), TrainConfig(precision=precision)
    config = Config(tiling=tiling, train=train, run=RunConfig(verbosity=0))
    request = Request(str(work / "large.tif"), output, config=config)
    on_gpu = part.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        begun = time.perf_counter()
        predict_all([request], checkpoint_mapper(checkpoint), memory_per_rank(mesh), mesh)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    found: dict[str, Any] = {"mpixel_per_second": side**2 / seconds / 1e6, "seconds": seconds}
    if on_gpu:
        busy = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6
        found["busy_share"] = busy / seconds
    return found


if __name__ == "__main__":
    sys.exit(main())
