"""Interrupted writes: signals at a touch of a file or after a while, and files that may not grow; then the command
again, undisturbed, which has to end as if nothing had been."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.files import LAST, MAP
from tests.fuzz.process import Interruption, Outcome, run
from tests.fuzz.trial import STEPS, STORE, Trial, finished_run, same_file, same_weights

COMMANDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "train": (["--config", "run.yaml"], ("run",)),
    "predict": (MAP, ("map.tif",)),
    "tile": ([*STORE, "--output", "new.h5"], ("new.h5",)),
    "scene": (["--size", "40", "40", "--image", "scene.tif", "--labels", "classes.tif"], ("scene.tif", "classes.tif")),
}
EVENTS = {"train": 260, "predict": 60, "tile": 60, "scene": 60}


def draw_trial(draw: random.Random, folder: Path) -> Trial:
    """A command that writes, ended in the middle."""
    command = draw.choice(("train", "train", "predict", "tile", "scene"))
    arguments, outputs = COMMANDS[command]
    if command == "train":
        shutil.rmtree(folder / "run")
    interruption = draw_interruption(draw, command)
    return Trial(command, arguments, f"{command}: {interruption}", outputs, interruption=interruption)


def draw_interruption(draw: random.Random, command: str) -> Interruption:
    """A signal at a touch of a file (the same at each run of the case), one after a while, or a limit of size."""
    way = draw.random()
    if way < 0.3:
        return Interruption(largest_file=draw.choice((0, 1, 100, 1000, draw.randrange(60_000))))
    signal = draw.choice(("SIGKILL", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGTERM"))
    if way < 0.75:
        return Interruption(signal, event=draw.randrange(1, EVENTS[command]))
    return Interruption(signal, seconds=draw.random() * 0.8)


def aftermath(trial: Trial, outcome: Outcome, folder: Path) -> list[str]:
    """Nothing with a final name that is not whole; and the same command again gives the whole result."""
    faults = [f"after the interruption: {fault}" for fault in _torn(trial.command, folder, outcome)]
    again = run(trial.command, trial.arguments, folder)
    if again.hung or again.code != 0:
        return [*faults, f"again: exit {again.code}: {again.err.strip()[:300]}"]
    return faults + [f"again: {fault}" for fault in _whole(trial.command, folder)] + _hidden(folder)


def _torn(command: str, folder: Path, outcome: Outcome) -> list[str]:
    final = [name for name in COMMANDS[command][1] if (folder / name).is_file()]
    if command != "train":
        if outcome.code == 0:
            return _whole(command, folder)
        return [] if command == "scene" and len(final) == 1 else [f for f in _whole(command, folder) if final]
    return _torn_run(folder / "run", outcome)


def _torn_run(path: Path, outcome: Outcome) -> list[str]:
    """Every checkpoint with a name has its files, and every JSON file is whole."""
    faults = finished_run(path.parent, "run", STEPS) if outcome.code == 0 else []
    names = ("manifest.json", "model.safetensors", "optimizer.safetensors")
    for step in path.glob("checkpoints/step-*"):
        faults += [f"{step.name} without {name}" for name in names if not (step / name).exists()]
    for file in (*path.glob("checkpoints/step-*/manifest.json"), *path.glob("summary.json")):
        try:
            json.loads(file.read_text())
        except ValueError:
            faults.append(f"{file.name} is torn")
    if outcome.code == 75 and not any(path.glob("checkpoints/step-*")) and any(path.glob("summary.json")):
        faults.append("exit 75 with steps done and no checkpoint")
    return faults


def _whole(command: str, folder: Path) -> list[str]:
    checks: dict[str, Callable[[], list[str]]] = {
        "train": lambda: finished_run(folder, "run", STEPS) + same_weights(folder),
        "predict": lambda: same_file(folder, "map.tif", (LAST,)),
        "tile": lambda: _same_store(folder),
        "scene": lambda: _same_scene(folder),
    }
    return checks[command]()


def _same_store(folder: Path) -> list[str]:
    """A store is whole where it maps as the reference does."""
    done = run("predict", [*MAP, "--image", "new.h5", "--output", "of-store.tif"], folder)
    if done.code != 0:
        return [f"new.h5 is torn: {done.err.strip()[:200]}"]
    faults = same_file(folder, "of-store.tif", (LAST,))
    (folder / "of-store.tif").unlink()
    return faults


def _same_scene(folder: Path) -> list[str]:
    """The same seed gives the same bytes."""
    shutil.rmtree(folder / "sound", ignore_errors=True)
    (folder / "sound").mkdir()
    files = ["--image", "sound/scene.tif", "--labels", "sound/classes.tif"]
    run("scene", ["--size", "40", "40", *files], folder)
    faults = [f for name in ("scene.tif", "classes.tif") for f in same_file(folder, name, (f"sound/{name}",))]
    shutil.rmtree(folder / "sound")
    return faults


def _hidden(folder: Path) -> list[str]:
    """What the interrupted command left has been cleared by the one after it."""
    names = [p for p in folder.rglob("*") if p.name.startswith(".") or ".part" in p.name]
    return [f"left over after the second run: {p.relative_to(folder)}" for p in names if "lock" not in p.name]
