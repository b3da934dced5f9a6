"""A tiny run, started under mpirun as users start it, and what two runs must have in common."""

import json
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.comm.launching import Done, mpirun
from tests.small_files import write_raster, write_yaml
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.train import main
from tiledseg.training.run_journal import Journal

JOB = str(Path(__file__).with_name("job.py"))
STEPS = 12
SECONDS_TO_END = 60
"""From the death of a rank to the end of the job. It takes about two; this leaves room for a busy machine."""
LIMIT_SECONDS = 240


@dataclass(frozen=True)
class Moment:
    """When rank `rank` gets a signal: as it meets the moment `name` of job.py for the `count`-th time."""

    name: str
    rank: int = 0
    count: int = 1
    signal: str = "KILL"


@dataclass(frozen=True)
class Material:
    """Rasters and the configuration of a run of twelve steps: four epochs of three, a checkpoint every two steps."""

    root: Path

    @staticmethod
    def make(root: Path) -> "Material":
        generator = np.random.default_rng(11)
        names = ("one", "two", "held-out")
        for name in names:
            labels_HW = np.kron(generator.integers(0, 3, (8, 8)), np.ones((8, 8))).astype(np.uint8)
            noise_CHW = generator.integers(0, 90, (3, 64, 64))
            write_raster(root / f"{name}.tif", (noise_CHW + 50 * labels_HW).astype(np.uint8))
            write_raster(root / f"{name}-labels.tif", labels_HW[None])
        material = Material(root)
        write_yaml(root / "run.yaml", material.config())
        return material

    def config(self) -> dict[str, Any]:
        paths = {name: str(self.root / f"{name}.tif") for name in ("one", "two", "held-out", "one-labels")}
        return {
            "data": {
                "images": [paths["one"], paths["two"]],
                "labels": [paths["one-labels"], str(self.root / "two-labels.tif")],
                "val_images": paths["held-out"],
                "val_labels": str(self.root / "held-out-labels.tif"),
                "classes": 3,
                "workers": 1,
            },
            "tiling": {"grid": 2},
            "model": {"levels": 2, "convs_per_level": 1, "base_channels": 3, "dropout": 0.2},
            "optimizer": {"name": "adamw", "lr": 0.02, "policy": "cosine", "warmup_steps": 3, "weight_decay": 0.01},
            "train": {
                **{"epochs": 4, "tiles_per_step": 3, "tiles_per_batch": 1, "checkpoint_every": 2},
                **{"precision": "fp64", "seed": 3},
            },
            "run": {"verbosity": 0},
        }

    def train(self, ranks: int, folder: Path, *options: str, at: Moment | None = None) -> Done:
        """Trains into `folder` on `ranks` ranks, of which one may be killed."""
        return self._start(ranks, at, *self.train_command(folder), *options)

    def train_command(self, folder: Path) -> list[str]:
        return ["train", "--config", str(self.root / "run.yaml"), "--run.output", str(folder)]

    def predict(self, ranks: int, checkpoint: Path, output: Path, *options: str, at: Moment | None = None) -> Done:
        """Maps the held-out image in sixteen tiles; one rank may be killed."""
        return self._start(ranks, at, *self.predict_command(checkpoint, output), *options)

    def predict_command(self, checkpoint: Path, output: Path) -> list[str]:
        files = ["--checkpoint", str(checkpoint), "--image", str(self.root / "held-out.tif"), "--output", str(output)]
        return ["predict", *files, "--tiling.grid", "4", "--verbosity", "0"]

    def notes(self) -> Path:
        """A new folder for what the ranks of a job leave to those outside."""
        return Path(tempfile.mkdtemp(prefix="notes-", dir=self.root))

    def _start(self, ranks: int, at: Moment | None, *command: str) -> Done:
        """Runs job.py to its end, which comes soon after a kill."""
        moment, notes = at or Moment("never"), self.notes()
        words = [str(notes), moment.signal, moment.name, str(moment.rank), str(moment.count)]
        done = mpirun(ranks, JOB, *words, *command, seconds=LIMIT_SECONDS)
        if at is not None:
            assert (notes / "signalled").exists(), f"{at} was never met: {done.err}"
            assert done.ended - float((notes / "signalled").read_text()) < SECONDS_TO_END
        return done


def train(material: Material, folder: Path, *options: str) -> int:
    """Trains on one rank in this process; the command's exit code."""
    return main([*material.train_command(folder)[1:], *options])


def after_step(patch: pytest.MonkeyPatch, step: int, act: Callable[[], object] | None = None) -> None:
    """Have a run act as it writes the line of a step; by default it gets SIGUSR1."""
    write_line = Journal.step

    def write_and_act(journal: Journal, line: dict[str, Any]) -> None:
        write_line(journal, line)
        if line["step"] == step:
            act() if act else os.kill(os.getpid(), signal.SIGUSR1)

    patch.setattr(Journal, "step", write_and_act)


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock and the machine. Every line must be whole."""
    kept = ("step", "epoch", "loss", "lr", "tiles", "pixels", "val")
    whole = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in kept if key in line} for line in whole]


def weights(folder: Path) -> dict[str, bytes]:
    """The newest checkpoint's network, optimizer and averaged weights, byte for byte."""
    return {path.name: path.read_bytes() for path in sorted(find_checkpoint(folder).path.glob("*.safetensors"))}


def step_losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder) if "loss" in line]
