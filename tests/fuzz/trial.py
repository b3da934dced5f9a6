"""One case: the good material that it starts from, what is run, and what is asked of the outcome."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.process import Interruption, Outcome, run_function
from tests.small_files import write_raster, write_yaml

SIDE = 32
PREDICT = ["--checkpoint", "run", "--image", "image.tif", "--output", "map.tif", "--verbosity", "0", "--workers", "1"]
STORE = ["--images", "image.tif", "--labels", "labels.tif", "--grid", "2", "--levels", "2", "--convs-per-level", "1"]


def good_config() -> dict[str, Any]:
    """Two epochs of two steps, a checkpoint after each; paths are those of the case's folder."""
    return {
        "data": {"images": "image.tif", "labels": "labels.tif", "classes": 3, "workers": 1},
        "tiling": {"grid": 2},
        "model": {"levels": 2, "convs_per_level": 1, "base_channels": 2},
        "optimizer": {"lr": 0.01},
        "train": {"epochs": 2, "tiles_per_step": 2, "checkpoint_every": 1, "keep_checkpoints": 9},
        "run": {"output": "run", "verbosity": 0},
    }


STEPS = 4


def make_rasters(root: Path) -> None:
    """An image, its labels and the configuration."""
    generator = np.random.default_rng(5)
    labels_HW = np.kron(generator.integers(0, 3, (8, 8)), np.ones((4, 4))).astype(np.uint8)
    image_CHW = (generator.integers(0, 60, (3, SIDE, SIDE)) + 60 * labels_HW + 1).astype(np.uint8)
    write_raster(root / "image.tif", image_CHW)
    write_raster(root / "labels.tif", labels_HW[None])
    write_yaml(root / "run.yaml", good_config())


def make_material() -> None:
    """Everything, in the current folder, by the commands themselves."""
    from tiledseg.predict import main as predict
    from tiledseg.train import main as train

    make_rasters(Path())
    assert train(["--config", "run.yaml"]) == 0
    os.makedirs("reference")
    for step in sorted(Path("run/checkpoints").glob("step-*")):
        output = f"reference/{step.name}.tif"
        assert predict([*PREDICT, "--tiling.grid", "2", "--checkpoint", str(step), "--output", output]) == 0
    shutil.copy(newest_weights(Path("run")), "reference/weights")
    assert (Path("reference") / f"step-{STEPS:06d}.tif").exists()


def make_pristine(root: Path) -> None:
    """The material of all cases, in `root`/pristine, made by a child."""
    (root / "pristine").mkdir()
    made = run_function(lambda: make_material() or 0, root / "pristine", limit=300)  # type: ignore[func-returns-value]
    if made.code != 0:
        raise RuntimeError(f"the material cannot be made: {made.err}")


def newest_weights(run: Path) -> Path:
    """The weights of the checkpoint of the last step."""
    return run / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors"


def restore(pristine: Path, case: Path) -> None:
    """The case's folder as it was made, whatever the case before has done to it."""
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(pristine, case)


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, and a word for what is no file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not path.is_symlink():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif not path.is_dir():
            found[name] = "no file"
    return found


CODES = (0, 1, 2, 75)


@dataclass(frozen=True)
class Trial:
    """A command on damaged material. `outputs`: names, relative to the case's folder, that it may make or change;
    `check` looks at the result of an exit 0, and says what is wrong with it; `words`: what was done, for a report."""

    command: str
    arguments: list[str]
    words: str
    outputs: tuple[str, ...] = ()
    check: Callable[[Path, Outcome], list[str]] = lambda folder, outcome: []
    interruption: Interruption | None = None


def common_faults(trial: Trial, outcome: Outcome, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What no command may do, whatever it was given."""
    faults = []
    if outcome.hung:
        return [f"hang: still running after {outcome.seconds:.0f} s"]
    if "Traceback (most recent call last)" in outcome.err:
        faults.append("traceback on standard error")
    killed = trial.interruption is not None and trial.interruption.signal == "SIGKILL" and outcome.code == -9
    if outcome.code not in CODES and not killed:
        faults.append(f"exit code {outcome.code}")
    lines = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    if outcome.code in (1, 2) and (len(lines) != 1 or outcome.err.splitlines()[-1] != lines[0]):
        faults.append(f"exit {outcome.code} with {len(lines)} lines of error")
    return faults + _files(trial, outcome, before, after, killed)


def _files(
    trial: Trial, outcome: Outcome, before: Mapping[str, str], after: Mapping[str, str], killed: bool
) -> list[str]:
    faults = []
    changed = [name for name in before if after.get(name) != before[name]]
    new = [name for name in after if name not in before]
    allowed = () if outcome.code == 2 else (*trial.outputs, *_beside(trial))
    faults += [f"input changed: {name}" for name in changed if not _below(name, allowed)]
    unfinished = [name for name in new if killed and ".part" in name]  # the next run clears it: `aftermath` looks
    faults += [f"left over: {name}" for name in new if not _below(name, allowed) and name not in unfinished]
    if not killed:
        hidden = [name for name in new if any(part.startswith(".") for part in Path(name).parts)]
        kept = [name for name in hidden if "lock" in Path(name).name]  # only a file once its holder is gone
        faults += [f"left over: {name}" for name in hidden if _below(name, allowed) and name not in kept]
    return faults


def _beside(trial: Trial) -> tuple[str, ...]:
    """What `predict` and `scene` write beside a map: names and colours of its classes, for GDAL and QGIS."""
    maps = [Path(name) for name in trial.outputs if trial.command in ("predict", "scene") and name.endswith(".tif")]
    return tuple(str(name) for path in maps for name in (path.with_suffix(".qml"), Path(f"{path}.aux.xml")))


def _below(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == entry or name.startswith(f"{entry}/") for entry in allowed)


def outcome_word(outcome: Outcome) -> str:
    """The outcome's row in the table."""
    if outcome.hung:
        return "hang"
    if outcome.code == 1 and "(unforeseen;" in outcome.err:
        return "1, unforeseen"
    return str(outcome.code) if outcome.code >= 0 else "killed"


def finished_run(folder: Path, run: str, steps: int | None = None) -> list[str]:
    """What is wrong with the folder of a run that says it is done; `steps`: how many it has to have."""
    faults = []
    path = folder / run
    try:
        summary = json.loads((path / "summary.json").read_text())
        metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        return [f"exit 0 without a whole {run}: {error}"]
    total = summary["steps"]
    if not summary["finished"] or (steps is not None and total != steps):
        faults.append(f"exit 0 at step {total} of {steps}, finished: {summary['finished']}")
    if [line["step"] for line in metrics if "loss" in line] != list(range(1, total + 1)):
        faults.append("metrics.jsonl does not have every step once")
    if not (path / "checkpoints" / f"step-{total:06d}" / "manifest.json").exists():
        faults.append(f"no checkpoint of the last step {total}")
    return faults


def same_weights(folder: Path) -> list[str]:
    """The end of a run whose meaning is unchanged is that of the reference, to the last bit."""
    path = newest_weights(folder / "run")
    if not path.exists() or path.read_bytes() != (folder / "reference" / "weights").read_bytes():
        return [f"exit 0, but the weights of step {STEPS} are not those of the undisturbed run"]
    return []


def same_file(folder: Path, name: str, references: tuple[str, ...]) -> list[str]:
    """A result that has to be one of the references, byte for byte."""
    if not (folder / name).exists():
        return [f"exit 0 without {name}"]
    data = (folder / name).read_bytes()
    if all(data != (folder / reference).read_bytes() for reference in references):
        return [f"exit 0, but {name} is not that of undamaged material"]
    return []
