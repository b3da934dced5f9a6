"""A tiny scene, the ways in which many ranks train on it, and how far they are from one rank."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.forks import Outcome, run_ranks
from benchmarks.many_ranks.ranks import Looks
from tests.small_files import write_raster, write_yaml
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.errors import CommunicationError

TILE = 16
IMAGES = 4
DEADLINE = 60


@dataclass(frozen=True)
class Case:
    """One way: what of an epoch is a step (`batch`, for one rank too), and how ranks share it."""

    name: str
    batch: tuple[str, ...]
    parallel: tuple[str, ...] = ()


def cases(ranks: int) -> list[Case]:
    """Of so many ranks, a square of an even number: all halo modes, replicas, and a pipeline."""
    side = math.isqrt(ranks)
    assert side * side == ranks, f"{ranks} ranks are no square"
    assert side % 2 == 0, f"{ranks} ranks are no square of an even number"
    tiles, image = ("--train.tiles_per_step", str(ranks)), ("--train.images_per_step", "1")
    images = ("--train.images_per_step", str(IMAGES))
    return [
        Case("read", tiles),
        Case("exchange", image, _shared("exchange", side)),
        Case("layer", image, _shared("layer", side)),
        Case("exchange, 4 replicas", images, _shared("exchange", side // 2)),
        Case("layer, 4 replicas", images, _shared("layer", side // 2)),
        Case("layer, 4 stages", image, (*_shared("layer", side // 2), "--parallel.stages", "4")),
    ]


def _shared(halo: str, side: int) -> tuple[str, ...]:
    return ("--parallel.halo", halo, "--parallel.mesh", f"[{side},{side}]")


def make_scene(root: Path, ranks: int) -> None:
    """Images of a tile a rank, and the configuration of a run of two epochs in float64, with validations."""
    generator = np.random.default_rng(11)
    side = math.isqrt(ranks)
    names = [f"image-{number}" for number in range(IMAGES)] + ["held-out"]
    for name in names:
        coarse_HW = generator.integers(0, 3, (2 * side, 2 * side))
        labels_HW = np.kron(coarse_HW, np.ones((TILE // 2, TILE // 2))).astype(np.uint8)
        noise_CHW = generator.integers(0, 90, (3, *labels_HW.shape))
        write_raster(root / f"{name}.tif", (noise_CHW + 50 * labels_HW).astype(np.uint8))
        write_raster(root / f"{name}-labels.tif", labels_HW[None])
    images, labels = ([str(root / f"{name}{end}.tif") for name in names] for end in ("", "-labels"))
    data = {"images": images[:-1], "labels": labels[:-1], "val_images": images[-1], "val_labels": labels[-1]}
    write_yaml(
        root / "run.yaml",
        {
            "data": {**data, "classes": 3, "workers": 1},
            "tiling": {"grid": side},
            "model": {"levels": 2, "convs_per_level": 1, "base_channels": 3, "dropout": 0.2},
            "optimizer": {"name": "sgd", "lr": 0.02},
            "train": {"epochs": 2, "tiles_per_step": None, "precision": "fp64", "seed": 3},
            "parallel": {"deadline": DEADLINE},
            "run": {"verbosity": 0},
        },
    )


def train(root: Path, name: str, ranks: int, options: tuple[str, ...], limit: float, looks: Looks) -> list[Outcome]:
    """Train into the folder `name` of `root`. Raise CommunicationError where a rank fails."""
    from tiledseg.train import main

    words = ["--config", str(root / "run.yaml"), "--run.output", str(root / name), *options]
    ends = run_ranks(partial(main, words), ranks, root, limit, look=looks)
    if any(end.code for end in ends):
        rank = next((rank for rank, end in enumerate(ends) if "error:" in end.err), 0)
        codes = [end.code for end in ends]
        raise CommunicationError(f"{name} on {ranks} ranks ended with {codes}; rank {rank}: {ends[rank].err}")
    return ends


@dataclass(frozen=True)
class Distance:
    """The largest relative difference of losses (steps and validations), and of last weights."""

    losses: float
    weights: float

    @property
    def largest(self) -> float:
        return max(self.losses, self.weights)


def distance(run: Path, alone: Path) -> Distance:
    """Between two runs of equal steps."""
    here, there = _losses(run), _losses(alone)
    assert len(here) == len(there) > 0, f"{run} has {len(here)} losses, {alone} has {len(there)}"
    mine, theirs = (load_file(find_checkpoint(str(folder)).path / "model.safetensors") for folder in (run, alone))
    assert mine.keys() == theirs.keys(), "one network"
    return Distance(_apart(np.array(here), np.array(there)), max(_apart(mine[name], theirs[name]) for name in mine))


def _apart(x: Any, y: Any) -> float:
    return float(np.abs(x - y).max() / np.abs(y).max())


def _losses(folder: Path) -> list[float]:
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["val"]["loss"] if "val" in line else line["loss"] for line in lines]
