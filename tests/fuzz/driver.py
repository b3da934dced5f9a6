"""Runs cases by their number: what case N of a seed does never depends on the others. Faults that are planted in a
command show that the harness finds each.

Interrupted writes: signals at a touch of a file or after a while, and files that may not grow; then the command again,
undisturbed, which has to end as if nothing had been.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.fuzz import files
from tests.fuzz.files import LAST, MAP
from tests.fuzz.process import LIMIT_SECONDS, Interruption, Outcome, run
from tests.fuzz.trial import (
    STEPS,
    STORE,
    Trial,
    common_faults,
    digests,
    finished_run,
    outcome_word,
    restore,
    same_file,
    same_weights,
)

COMMANDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "train": (["--config", "run.yaml"], ("run",)),
    "predict": (MAP, ("map.tif",)),
    "tile": ([*STORE, "--output", "new.h5"], ("new.h5",)),
    "scene": (["--size", "40", "40", "--image", "scene.tif", "--labels", "classes.tif"], ("scene.tif", "classes.tif")),
}
EVENTS = {"train": 260, "predict": 60, "tile": 60, "scene": 60}


def draw_interrupted(draw: random.Random, folder: Path) -> Trial:
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


Draw = Callable[[random.Random, Path], Trial]
KINDS: dict[str, Draw] = {
    "rasters": files.draw_raster,
    "checkpoints": files.draw_checkpoint,
    "interrupted writes": draw_interrupted,
}


@dataclass(frozen=True)
class Result:
    """What one case came to."""

    number: int
    kind: str
    words: str
    outcome: str
    seconds: float
    faults: list[str]
    said: str


def warm_up() -> None:
    """Imports what every command imports, once, with one thread: the forked cases share it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as a session has it, for the ranks that are forks
    import torch

    torch.set_num_threads(1)
    for name in ("train", "predict", "evaluate", "plan", "tile", "scene", "doctor"):
        __import__(f"tiledseg.{name}")
    for name in ("tiledseg.training.start", "tiledseg.inference.predictor", "tiledseg.comm.diagnosis", "h5py"):
        __import__(name)
    parse: Any = __import__("tiledseg.commands.options", fromlist=["parse_config"]).parse_config
    parse([], "tiledseg train", "Train a segmentation network on tiles.")  # as `train` does: its parser is kept
    retrying: Any = __import__("tiledseg.raster.mirrored_reader", fromlist=["PAUSES"])
    retrying.PAUSES = (0.0,) * len(retrying.PAUSES)  # damaged files are tried as often, but at once
    for extra in ("torch.utils.tensorboard", "matplotlib.figure"):
        try:
            __import__(extra)
        except ImportError:
            continue


class Workshop:
    """A folder with a copy of the material, in which cases run one after the other."""

    def __init__(self, root: Path, name: str = "case") -> None:
        self.pristine, self.case = root / "pristine", root / name
        self.plant: Callable[[], None] | None = None
        self.limit = LIMIT_SECONDS

    def run(self, seed: int, number: int, kinds: Sequence[str] = tuple(KINDS)) -> Result:
        """Case `number` of a seed: prepared, run and judged."""
        kind = kinds[number % len(kinds)]
        draw = random.Random(f"{seed} {number} {kind}")
        restore(self.pristine, self.case)
        trial = KINDS[kind](draw, self.case)
        outcome, faults = self.judge(trial)
        return Result(number, kind, trial.words, outcome_word(outcome), outcome.seconds, faults, _told(trial, outcome))

    def judge(self, trial: Trial) -> tuple[Outcome, list[str]]:
        """How a trial ends, and all that is wrong with it."""
        before = digests(self.case)
        outcome = run(trial.command, trial.arguments, self.case, trial.interruption, self.limit, self.plant)
        faults = common_faults(trial, outcome, before, digests(self.case))
        if trial.interruption is not None and not outcome.hung:
            faults += aftermath(trial, outcome, self.case)
        elif outcome.code == 0:
            faults += trial.check(self.case, outcome)
        return outcome, faults


def _told(trial: Trial, outcome: Outcome) -> str:
    return f"{trial.command} {' '.join(trial.arguments)[:300]} -> {outcome.code}: {outcome.err.strip()[-300:]}"


def run_cases(root: Path, seed: int, numbers: Sequence[int], kinds: Sequence[str], jobs: int) -> list[Result]:
    """Results of all cases, from `jobs` processes."""
    mixed = list(numbers)
    random.Random(seed).shuffle(mixed)  # kinds differ in their times, and follow each other in the order of the numbers
    children = []
    for job in range(jobs):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                workshop = Workshop(root, f"case-{job}")
                lines = [json.dumps(asdict(workshop.run(seed, number, kinds))) for number in mixed[job::jobs]]
                (root / f"results-{job}.jsonl").write_text("\n".join(lines))
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    failed = [child for child in children if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0]
    if failed:
        raise RuntimeError(f"{len(failed)} of {jobs} processes of the harness failed")
    lines = [line for log in root.glob("results-*.jsonl") for line in log.read_text().splitlines()]
    return sorted((Result(**json.loads(line)) for line in lines), key=lambda result: result.number)


def missed(workshop: Workshop) -> int:
    """Count the plants that are not found; print a line for each: its name, what has to be found, what was found."""
    count = 0
    for name, (trial, plant, limit, word) in PLANTS.items():
        restore(workshop.pristine, workshop.case)
        workshop.plant, workshop.limit = plant, limit
        _, faults = workshop.judge(trial)
        found = any(fault.startswith(word) for fault in faults) if word else not faults
        count += not found
        print(f"{name}: {'found' if found else 'MISSED'}: {word or 'no fault'}: {faults}")
    return count


def _after(command: str, change: Callable[[], None], code: int | None = None) -> Callable[[], None]:
    """The command does its work; then `change` happens, and it ends with `code`."""

    def plant() -> None:
        module: Any = importlib.import_module(f"tiledseg.{command}")
        done = module.main

        def changed(arguments: list[str]) -> int:
            result = int(done(arguments))
            change()
            return result if code is None else code

        module.main = changed

    return plant


def _say(text: str) -> Callable[[], None]:
    return lambda: print(text, file=sys.stderr)


def _flip(name: str) -> Callable[[], None]:
    def flip() -> None:
        data = Path(name).read_bytes()
        Path(name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    return flip


def _torn_map() -> None:
    """Half a map under its final name, and the process dies."""
    Path("map.tif").write_bytes(Path(LAST).read_bytes()[:100])
    with contextlib.suppress(ProcessLookupError):
        os.kill(os.getpid(), signal.SIGKILL)


GOOD = Trial("predict", MAP, "a good map", ("map.tif",), lambda f, o: same_file(f, "map.tif", (LAST,)))
KILLED = Trial("predict", MAP, "a kill", ("map.tif",), interruption=Interruption("SIGKILL", seconds=30.0))
# Name: the trial, the plant, the limit in seconds, and how the fault that has to be found begins ("": none may be).
PLANTS: dict[str, tuple[Trial, Callable[[], None] | None, float, str]] = {
    "nothing in a map": (GOOD, None, 20, ""),
    "traceback": (GOOD, _after("predict", _say("Traceback (most recent call last)")), 20, "traceback"),
    "hang": (GOOD, lambda: time.sleep(60), 2, "hang"),
    "failure without a word": (GOOD, _after("predict", lambda: None, 1), 20, "exit 1 with 0 lines"),
    "missing result": (GOOD, _after("predict", lambda: os.remove("map.tif")), 20, "exit 0 without map.tif"),
    "changed result": (GOOD, _after("predict", _flip("map.tif")), 20, "exit 0, but map.tif is not"),
    "changed input": (GOOD, _after("predict", _flip("image.tif")), 20, "input changed: image.tif"),
    "left over": (GOOD, _after("predict", lambda: Path("stray").touch()), 20, "left over: stray"),
    "torn result of a kill": (KILLED, _torn_map, 20, "after the interruption"),
}
