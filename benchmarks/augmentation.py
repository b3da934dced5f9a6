"""What augmentation costs: the same training run with it and without, by turns.

    OMP_NUM_THREADS=1 python -m benchmarks.augmentation --side 768 --rounds 5

A synthetic scene of 4 bands, 9 tiles, the demo's network (U-Net of 4 levels, 12 channels), fp32, one rank, two reading
threads. Each round trains four epochs of each kind in a new run. Prints one JSON line: of each kind the throughput as a
share of that without augmentation. `clock`: by the seconds of the steps after the first epoch, waiting for tiles
included, in the same round: the median over the rounds, the least and the largest. `processor`: by the CPU seconds of
all threads of the whole run, as if reading had no core of its own, the least over the rounds, which another load
disturbs less. `seconds`: of an epoch without.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.commands.config_file import to_yaml
from tiledseg.config.run import Config, DataConfig, ModelConfig, RunConfig, TilingConfig, TrainConfig
from tiledseg.synthetic.scene_files import write_scene
from tiledseg.training.start import start

EPOCHS = 4
PLACES: list[Any] = [{"reflect": ["row", "col"]}, "turn", {"translate": 10}]
VALUES: list[Any] = [{"brightness": 0.1}, {"contrast": 0.1}, {"drop_bands": 0.1}]
SCALE: list[Any] = [{"scale": [0.8, 1.25]}]
ROTATE: list[Any] = [{"rotate": 15}]
NOISE: list[Any] = [{"noise": 0.05}]
KINDS: dict[str, list[Any]] = {
    "none": [],
    "reflect, turn, translate": PLACES,
    "scale": SCALE,
    "rotate": ROTATE,
    "brightness, contrast, drop_bands": VALUES,
    "noise": NOISE,
    "all": [*PLACES, *SCALE, *ROTATE, *VALUES, *NOISE],
}


class Spent(NamedTuple):
    """Seconds: of the steps after the first epoch by the clock, of the whole run on the processor."""

    clock: float
    processor: float


def train(folder: Path, name: str, augment: list[Any]) -> Spent:
    config = Config(
        data=DataConfig(str(folder / "image.tif"), str(folder / "labels.tif"), classes=5),
        tiling=TilingConfig(grid=3),
        model=ModelConfig(levels=4, base_channels=12),
        train=TrainConfig(epochs=EPOCHS, tiles_per_step=3, augment=augment),
        run=RunConfig(output=str(folder / name), verbosity=0),
    )
    mesh = Mesh(SERIAL, SerialCommunicator(), torch.device("cpu"), "serial", "here")
    before = _processor()
    if start(config, to_yaml(config), mesh) != 0:
        raise SystemExit(1)
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    clock = sum(line["seconds"] for line in lines if "loss" in line and line["epoch"] > 0)
    return Spent(clock, _processor() - before)


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=768, help="of the scene, in px")
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    spent: dict[str, list[Spent]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_scene(folder / "image.tif", folder / "labels.tif", (flags.side, flags.side))
        train(folder, "warm-up", [])
        for number in range(flags.rounds):
            for kind, augment in KINDS.items():
                spent[kind].append(train(folder, f"{number} {kind}", augment))
    plain = spent.pop("none")
    found = {kind: shares(plain, took) for kind, took in spent.items()}
    epoch = statistics.median(each.clock for each in plain) / (EPOCHS - 1)
    print(json.dumps({"seconds": round(epoch, 3), "throughput": found}))


def shares(plain: list[Spent], took: list[Spent]) -> dict[str, Any]:
    each = [a.clock / b.clock for a, b in zip(plain, took, strict=True)]
    least = min(a.processor for a in plain) / min(b.processor for b in took)
    return {"clock": [round(f(each), 3) for f in (statistics.median, min, max)], "processor": round(least, 3)}


if __name__ == "__main__":
    main()
