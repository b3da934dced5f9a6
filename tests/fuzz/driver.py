"""Runs cases by their number: what case N of a seed does never depends on the others. Faults that are planted in a
command show that the harness finds each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.fuzz import files, interruptions, lines
from tests.fuzz.files import LAST, MAP
from tests.fuzz.process import LIMIT_SECONDS, Interruption, Outcome, run
from tests.fuzz.trial import Trial, common_faults, digests, outcome_word, restore, same_file

Draw = Callable[[random.Random, Path], Trial]
KINDS: dict[str, Draw] = {
    "configurations": lines.draw_configuration,
    "rasters": files.draw_raster,
    "stores": files.draw_store,
    "checkpoints": files.draw_checkpoint,
    "command lines": lines.draw_line,
    "interrupted writes": interruptions.draw_trial,
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
            faults += interruptions.aftermath(trial, outcome, self.case)
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
