"""Faults that are planted in a command, to see that the harness finds each."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.driver import Workshop
from tests.fuzz.files import LAST, MAP
from tests.fuzz.process import Interruption
from tests.fuzz.trial import Trial, restore, same_file


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
        module = importlib.import_module(f"tiledseg.{command}")
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
