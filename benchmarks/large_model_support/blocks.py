"""A step that needs eight times the memory there is, trained in blocks.

`python -m benchmarks.large_model_support.blocks`

A U-Net with instance norm takes optimizer steps on a synthetic scene as one tile, three times by the command `train`:
the image whole, without a limit; whole, in a control group of an eighth of what it needs, where the system kills it;
and in blocks that lie in a file, in the same group. Losses of the first and the last are compared. Several `--images` a
step go together through a batch norm in place of the instance norm. `--small` is the form of the tests: there the
program itself is most of what is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rasterio

from benchmarks.large_model_support.limits import Done, run_limited
from tiledseg.architecture.unet import UNet
from tiledseg.planning.walk.step_memory import training_memory

MIB = 1 << 20
SMALL_LIMIT = 330 * MIB


class NoControlGroupError(RuntimeError):
    """Nothing can be limited here."""


@dataclass(frozen=True)
class Trial:
    """A side of the image in pixels, the network, the blocks, optimizer steps, and images of each."""

    side: int
    levels: int
    channels: int
    blocks: int
    steps: int
    images: int = 1

    @property
    def norm(self) -> str:
        return "instance" if self.images == 1 else "batch"

    @property
    def needed(self) -> int:
        """Bytes of a step on whole images, as planned, without the program itself."""
        network = UNet(self.levels, 2, 3, self.channels, norm=self.norm, bands=4, classes=3)
        one = training_memory(network.graph(), 4, (self.side, self.side))
        return one.total + (self.images - 1) * (one.activations + one.backward)

    def write(self, folder: Path) -> None:
        """Draws images and labels."""
        for number in range(self.images):
            (folder / f"{number}").mkdir()
            self._write(folder / f"{number}", np.random.default_rng(1 + number))

    def _write(self, folder: Path, generator: np.random.Generator) -> None:
        """Row by row."""
        profile = {"driver": "GTiff", "height": self.side, "width": self.side, "dtype": "uint8", "tiled": True}
        with (
            rasterio.open(folder / "image.tif", "w", count=4, **profile) as image,
            rasterio.open(folder / "labels.tif", "w", count=1, **profile) as labels,
        ):
            for row in range(0, self.side, 64):
                rows = min(64, self.side - row)
                window = rasterio.windows.Window(0, row, self.side, rows)
                labels_HW = generator.integers(0, 3, (rows // 16 or 1, -(-self.side // 16)), np.uint8)
                labels_HW = labels_HW.repeat(16, 0).repeat(16, 1)[:rows, : self.side]
                noise_CHW = generator.integers(0, 90, (4, rows, self.side), np.uint8)
                image.write(noise_CHW + 50 * labels_HW, window=window)
                labels.write(labels_HW[None], window=window)

    def command(self, folder: Path, output: str, *options: str) -> list[str]:
        names = {"images": "image.tif", "labels": "labels.tif"}
        files = {key: [str(folder / f"{n}" / name) for n in range(self.images)] for key, name in names.items()}
        config: dict[str, Any] = {
            "data": {**files, "classes": 3, "workers": 1},
            "model": {"levels": self.levels, "base_channels": self.channels, "norm": self.norm},
            "tiling": {"grid": 1},
            "train": {"epochs": self.steps, "images_per_step": self.images, "checkpoint_every": 10**6},
            "parallel": {"halo": "layer", "mesh": [1, 1]} if self.images > 1 else {},
            "run": {"output": str(folder / output), "verbosity": 0},
        }
        (folder / f"{output}.yaml").write_text(json.dumps(config))
        return [sys.executable, "-m", "tiledseg", "train", "--config", str(folder / f"{output}.yaml"), *options]


SMALL = Trial(side=320, levels=2, channels=32, blocks=3, steps=1)


def measure(trial: Trial, folder: Path, limit: int, store: Path) -> list[str]:
    """The lines of the report. Raises RuntimeError where blocks do not fit, or give other losses."""
    trial.write(folder)
    everything = 1 << 60
    whole = _run(trial.command(folder, "whole"), everything)
    _expect(whole)
    killed, blocks = limited(trial, folder, limit, store)
    losses = {name: _losses(folder / name) for name in ("whole", "blocks")}
    distance = max(abs(a - b) / abs(a) for a, b in zip(losses["whole"], losses["blocks"], strict=True))
    if distance > 1e-5:
        raise RuntimeError(f"losses differ by {distance:.1e}: {losses}")
    return [
        f"{trial}: {trial.needed / MIB:.0f} MiB planned, {trial.needed / limit:.1f} times the limit, "
        f"{limit / MIB:.0f} MiB",
        f"whole, no limit: {whole.seconds:.1f} s, peak {whole.peak / MIB:.0f} MiB",
        f"whole, limited: exit {killed.code}",
        f"blocks in a file, limited: {blocks.seconds:.1f} s ({blocks.seconds / whole.seconds:.2f} times), "
        f"peak {blocks.peak / MIB:.0f} MiB",
        f"losses {losses['blocks']}, relative distance {distance:.1e}",
    ]


def limited(trial: Trial, folder: Path, limit: int, store: Path) -> tuple[Done, Done]:
    """The image whole and in blocks, under a limit; its files are in `folder`. Raises RuntimeError where blocks do not
    fit, or the whole does."""
    killed = _run(trial.command(folder, "killed"), limit)
    if killed.code == 0:
        raise RuntimeError(f"the whole image fits {limit / MIB:.0f} MiB: there is nothing to show")
    options = "--memory.blocks", str(trial.blocks), "--memory.store", str(store)
    blocks = _run(trial.command(folder, "blocks", *options), limit)
    _expect(blocks)
    return killed, blocks


def _run(command: list[str], limit: int) -> Done:
    done = run_limited(command, limit)
    if done is None:
        raise NoControlGroupError("no control group can be made here; run as root, or where cgroups are delegated")
    return done


def _expect(done: Done) -> None:
    if done.code:
        raise RuntimeError(f"train ended with {done.code}, at {done.peak / MIB:.0f} MiB: {done.errors[-2000:]}")


def _losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--channels", type=int, default=24)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--images", type=int, default=1, help="of a step")
    parser.add_argument("--times", type=float, default=8.0, help="what the image needs, over the limit")
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    trial = Trial(options.side, options.levels, options.channels, options.blocks, options.steps, options.images)
    limit = int(trial.needed / options.times)
    if options.small:
        trial, limit = SMALL, SMALL_LIMIT
    with tempfile.TemporaryDirectory(dir=options.store) as folder:
        print("\n".join(measure(trial, Path(folder), limit, options.store)))


if __name__ == "__main__":
    main()
