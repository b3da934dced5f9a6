"""Commands on the pretend GPU: no race, no mixed devices, and losses, checkpoints and maps as on the CPU.

Run as `python -m tests.pretend_gpu.test_runs JSON`, a list of [name, command, arguments, Event.query's answer], it runs
them one after the other: starting a process costs more than a tiny run.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import rasterio
import torch
from safetensors.torch import load_file

from tests.crash.runs import Material, lines
from tests.pretend_gpu.harness import ROOT, PretendGpu, Ran
from tests.small_files import write_yaml
from tiledseg.checkpoint.folder import find_checkpoint

FP32 = ("--train.precision", "fp32")
SMALL = ("--model.levels", "2", "--model.base_channels", "3")
LAYER = ("--parallel.halo", "layer")
SETTINGS: dict[str, tuple[str, ...]] = {
    "fp64": (),
    "fp32": FP32,
    "bf16": ("--train.precision", "bf16"),
    "fast kernels": (*FP32, "--train.deterministic", "false"),
    "batches": ("--train.tiles_per_batch", "2"),
    "blocks": ("--memory.blocks", "2"),
    "recompute": ("--memory.recompute", "all"),
    "average, clipping": ("--train.ema", "0.9", "--optimizer.name", "sgd", "--optimizer.clip_norm", "0.5"),
    "tversky": ("--train.loss", "tversky", "--train.class_weights", "[1,2,0.5]"),
    "boundary": ("--train.loss", "boundary"),
    "augment": ("--train.augment", "[reflect, turn, {rotate: 20}, {brightness: 0.2}, {noise: 0.1}]"),
    "layer, batch norm": (*LAYER, *SMALL, "--model.norm", "batch"),
    "layer, instance norm": (*LAYER, *SMALL, "--model.norm", "instance"),
    "pixel norm, bilinear": ("--model.norm", "pixel", "--model.upsampling", "bilinear"),
    "segnet": (*LAYER, "--model.name", "segnet", "--model.base_channels", "2", "--model.levels", "2"),
}
QUERIES = {"never": 0.0, "always": 1.0, "coin": 0.5}
BOUNDS = {"bf16": 5e-2, "fp32": 1e-4, "fast kernels": 1e-4}
JOURNALS = "tiledseg.training.run_journal", "tiledseg.training.run_page"
Command = tuple[str, str, list[str], str]


def whole_images(material: Material) -> Path:
    """Write the configuration without what some networks and halo modes do not take."""
    config = material.config()
    config["model"] = {}
    del config["train"]["tiles_per_step"], config["train"]["tiles_per_batch"]
    write_yaml(material.root / "whole.yaml", config)
    return material.root / "whole.yaml"


def commands(material: Material, folder: Path, on_gpu: bool) -> Iterable[Command]:
    """A training of each setting, maps of one of them, and what leaves for the host's memory."""
    whole = whole_images(material)
    for name, options in SETTINGS.items():
        file = str(whole if "--parallel.halo" in options else material.root / "run.yaml")
        words = ["--config", file, "--run.output", str(folder / name), "--train.epochs", "2", *options]
        yield name, "train", words, "coin"
    yield "map", "predict", material.predict_command(folder / "fp32", folder / "map.tif")[1:], "coin"
    words = [*material.predict_command(folder / "fp32", folder / "m2.tif")[1:], "--probabilities"]
    yield "shares", "predict", [*words, str(folder / "shares.tif")], "never"
    for query in QUERIES if on_gpu else ():
        options = ["--train.epochs", "2", "--memory.offload", "all"]
        yield f"offload {query}", "train", [*material.train_command(folder / f"offload {query}")[1:], *options], query


@pytest.fixture(scope="module")
def folders(any_gpu: PretendGpu, material: Material) -> tuple[Path, Path, Ran]:
    """What the commands left on the CPU, and on the pretend GPU."""
    root = material.root
    (root / "cpu").mkdir()
    (root / "gpu").mkdir()
    arguments = json.dumps(list(commands(material, root / "gpu", on_gpu=True)))
    ran = any_gpu.run(["-m", "tests.pretend_gpu.test_runs", arguments])
    arguments = json.dumps(list(commands(material, root / "cpu", on_gpu=False)))
    words = [sys.executable, "-m", "tests.pretend_gpu.test_runs", arguments]
    alone = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run(words, cwd=ROOT, env=alone, check=True, timeout=240)
    return root / "cpu", root / "gpu", ran


def test_no_run_fails_or_races(folders: tuple[Path, Path, Ran]) -> None:
    ran = folders[2].sound()
    statuses = {name: status for name, status, _ in map(json.loads, ran.out.splitlines())}
    assert len(statuses) == len(SETTINGS) + 2 + len(QUERIES)
    assert not any(statuses.values()), statuses


def losses(found: list[dict]) -> list[float]:
    """Return those of steps and of validations."""
    return [line["loss"] if "loss" in line else line["val"]["loss"] for line in found if {"loss", "val"} & {*line}]


@pytest.mark.parametrize("name", [*SETTINGS, *(f"offload {query}" for query in QUERIES)])
def test_losses_and_checkpoints_are_the_cpu_s(name: str, folders: tuple[Path, Path, Ran]) -> None:
    reference = "fp64" if name.startswith("offload") else name
    bound = BOUNDS.get(name, 1e-9)
    found, expected = lines(folders[1] / name), lines(folders[0] / reference)
    assert losses(found) == pytest.approx(losses(expected), rel=bound)
    runs = folders[1] / name, folders[0] / reference
    there, here = (load_file(find_checkpoint(run).path / "model.safetensors") for run in runs)
    torch.testing.assert_close(there, here, rtol=10 * bound, atol=10 * bound)
    if name.startswith("offload"):
        assert json.loads((folders[1] / name / "summary.json").read_text())["offloaded"]["bytes_in"] > 0


@pytest.mark.parametrize("name", ["map.tif", "m2.tif", "shares.tif"])
def test_maps_are_the_cpu_s(name: str, folders: tuple[Path, Path, Ran]) -> None:
    with rasterio.open(folders[1] / name) as there, rasterio.open(folders[0] / name) as here:
        found, expected = there.read().astype(float), here.read().astype(float)
    assert abs(found - expected).max() <= 1e-4 if name == "shares.tif" else (found != expected).mean() < 1e-3


# Settings with a loss that is a ratio of sums over the step: docs/how-to/gpu.md.
TWO_A_STEP = ("tversky", "boundary")


def test_a_step_makes_the_host_wait_once(folders: tuple[Path, Path, Ran]) -> None:
    """By line, with each norm and mode; times of a step that is over, validations and checkpoints wait besides."""
    _, gpu, ran = folders
    assert ran.report
    for name, _, waits in map(json.loads, ran.out.splitlines()):
        if name not in SETTINGS or name == "blocks":
            continue
        steps = sum("loss" in line for line in lines(gpu / name))
        # memory/device.py: of a step that is over; of a constant, once a run.
        of_steps = [each for each in waits if "training/step.py" in each[0] and "memory/device.py" not in each[0]]
        assert 0 < sum(count for _, count in of_steps) <= (2 if name in TWO_A_STEP else 1) * steps, (name, of_steps)


def run(commands: list[Command]) -> None:
    """Print for each command its name, its status, and how often the host waited, by kind and place."""
    gpu: Any = import_module("tests.pretend_gpu.device").gpu if "PRETEND_GPU_DEVICES" in os.environ else None
    offload, journal, page = map(import_module, ("tiledseg.memory.offload", *JOURNALS))
    offload.LEAST = 1  # these networks have no large tensors
    journal.plot_progress = page.write_report = lambda *given: True
    for name, command, arguments, query in commands:
        if gpu:
            gpu.waits.clear()
            gpu.query = QUERIES[query]
        status = import_module(f"tiledseg.{command}").main(arguments)
        waits = [[f"{kind} at {place}", count] for (kind, place), count in gpu.waits.items()] if gpu else []
        print(json.dumps([name, status, waits]), flush=True)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
