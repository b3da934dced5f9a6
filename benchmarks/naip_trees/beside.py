"""A row's run and the anchor, side by side: started together, one thread each, ended together."""

from __future__ import annotations

import math
import shutil
from concurrent.futures import ThreadPoolExecutor

import rasterio
import yaml

from benchmarks.launching import python, run_job
from benchmarks.naip_trees.anchor import Job
from benchmarks.naip_trees.rows import Settings, of_run
from benchmarks.naip_trees.runs import HELD_OUT, Place, read_result, result_file, train_row, write_result

ANCHOR = "anchor"
SIDE = 256  # of the anchor's crops


def train_beside(place: Place, row: str, settings: Settings, seed: int, steps: int) -> str:
    """Trains both unless their results are there, and says both scores in words. Their results go to ROW-beside and
    ROW-anchor."""
    own, folder = place.run(f"{row}-beside", seed), place.run(f"{row}-{ANCHOR}", seed)
    if not result_file(folder).exists():
        shutil.rmtree(own, ignore_errors=True)  # without the other one it was not beside it
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "config.yaml"
        asked = of_run(settings, place.data, own / "run", steps, seed)
        config.write_text(yaml.safe_dump(asked, sort_keys=False))
        job = Job(str(place.data), str(config), str(own / "run"), steps_of(asked), seed, str(folder), SIDE)
        job.write(folder / "job.json")
        with ThreadPoolExecutor(1) as pool:
            words = python("benchmarks.naip_trees.anchor", str(folder / "job.json"))
            anchor = pool.submit(run_job, words, place.limit)
            train_row(place, own.parent.name, settings, seed, steps)
            write_result(folder, anchor.result())
    ours, theirs = read_result(own), read_result(folder)
    return f"seed {seed}: {row} {ours[HELD_OUT]:.4f}, the anchor {theirs[HELD_OUT]:.4f} on held-out blocks"


def steps_of(asked: Settings) -> int:
    """The steps that a run takes: its epochs are whole ones."""
    train = asked["train"]
    with rasterio.open(asked["data"]["images"]) as file:
        pixels = file.height * file.width
    return int(train["epochs"] * math.ceil(pixels / (train["windows_per_step"] * train["window"] ** 2)))
