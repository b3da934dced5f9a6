"""A whole scene of 10000 x 10000 x 4, tiled 8 x 8: an epoch of training and a map, with the figures that matter.

    python -m benchmarks.whole_scene [--side 10000] [--grid 8] [--ranks 2] [--folder DIR]

Writes the scene, trains for one epoch under mpirun and maps the scene, each as a user would by the commands; prints
peak memory a rank, pixels a second and the share of time spent waiting for data.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--side", type=int, default=10000)
    parser.add_argument("--grid", type=int, default=8)
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--base-channels", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tiles-per-step", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("runs/whole-scene"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    image, labels, run = (options.folder / name for name in ("image.tif", "labels.tif", "run"))
    if not image.exists():
        side = str(options.side)
        seconds = timed(["scene", "--size", side, side, "--seed", "1", "--image", str(image), "--labels", str(labels)])
        print(f"scene: {seconds:.0f} s")
    configuration = {
        "data": {"images": str(image), "labels": str(labels), "classes": 5},
        "tiling": {"grid": options.grid},
        "model": {"levels": options.levels, "base_channels": options.base_channels},
        "train": {"epochs": 1, "tiles_per_step": options.tiles_per_step},
        "run": {"output": str(run)},
    }
    (options.folder / "run.yaml").write_text(yaml.safe_dump(configuration, sort_keys=False))
    seconds = timed(["train", "--config", str(options.folder / "run.yaml")], options.ranks)
    report_training(run, seconds)
    output = options.folder / "map.tif"
    arguments = ["predict", "--checkpoint", str(run), "--image", str(image), "--output", str(output)]
    seconds = timed([*arguments, "--tiling.grid", str(options.grid)], options.ranks)
    print(f"predict: {seconds:.0f} s in all, {options.side**2 / seconds / 1e6:.2f} Mpixel/s, start-up included")
    print(f"load {os.getloadavg()[0]:.1f}")


def timed(command: list[str], ranks: int = 0) -> float:
    """Seconds of `python -m tiledseg.COMMAND`, under mpirun where `ranks` are given."""
    python = [sys.executable, "-m", f"tiledseg.{command[0]}", *command[1:]]
    launcher = ["mpirun", "--oversubscribe", "-n", str(ranks)] if ranks else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    begun = time.perf_counter()
    subprocess.run(launcher + python, check=True, env=environment)
    return time.perf_counter() - begun


def report_training(run: Path, seconds: float) -> None:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    spent = sum(step["seconds"] for step in steps)
    waited = sum(step["data_seconds"] for step in steps)
    later = sum(step["data_seconds"] for step in steps[1:])
    pixels = sum(step["pixels"] for step in steps)
    print(f"train: {seconds:.0f} s in all, {len(steps)} steps of {spent:.0f} s together")
    print(f"  {pixels / spent / 1e6:.3f} Mpixel/s (valid core pixels over seconds in steps)")
    print(f"  waiting for data {waited / spent:.2%} ({later / spent:.2%} without the first step)")
    communicated = sum(step["communication_seconds"] for step in steps)
    print(f"  waiting for other ranks and the all-reduce {communicated / spent:.2%}")
    print(f"  peak memory of the largest rank {max(step['memory_bytes'] for step in steps) / 2**30:.2f} GiB")
    print(f"  loss {steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f}")


if __name__ == "__main__":
    main()
