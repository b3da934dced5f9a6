"""One start of `train` in a case's folder, with what befalls it on the way: called in a forked process, and as the
program of the ranks under mpirun: `python -m benchmarks.faults.job FOLDER ORDER`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.acts import ACTS
from benchmarks.faults.kinds import Moment
from tiledseg.comm.launch import detect

NOTE = "further"
"""The file that keeps when a run first stood further than the one before: Unix seconds."""


@dataclass(frozen=True)
class Order:
    """What a start is given: a fault, if any, and how many steps the runs before have done."""

    moment: Moment | None = None
    done: int = 0
    options: tuple[str, ...] = ()

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Order:
        values = json.loads(text)
        moment = Moment(**values["moment"]) if values["moment"] else None
        return Order(moment, values["done"], tuple(values["options"]))


def train(order: Order) -> int:
    """Trains in the current folder; the exit code."""
    launch = detect(os.environ)
    if launch.launcher == "openmpi":
        import mpi4py.MPI  # noqa: F401  (before torch)
    moment = order.moment
    if moment is not None and moment.rank <= launch.rank < moment.rank + moment.ranks:
        _arm(moment)
    _note_progress(order.done)
    from tiledseg.train import main

    return main(["--config", "run.yaml", *order.options])


def train_unseen(order: Order) -> int:
    """The same in a fork, in less time: no pictures are drawn, and nobody waits for a launcher to end him."""
    from tiledseg.comm import failure
    from tiledseg.training import run_journal as journal
    from tiledseg.training import run_page as page

    failure.GRACE_SECONDS = 0.5
    journal.plot_progress = lambda *given: None
    page.write_report = lambda *given: None
    return train(order)


def _arm(moment: Moment) -> None:
    def act() -> None:
        ACTS[moment.act](moment.draw)

    if moment.save:
        _at_touches(_countdown(moment.save, act))
    else:
        _in_step(moment.step, _countdown(1, act))


def _countdown(count: int, act: Callable[[], None]) -> Callable[[], None]:
    left = [count]

    def meet() -> None:
        left[0] -= 1
        if left[0] == 0:
            act()

    return meet


def _in_step(number: int, meet: Callable[[], None]) -> None:
    """Between the forward pass of a tile and its backward pass, in step `number` (from 1)."""
    from tiledseg.training.objective import PixelTerm
    from tiledseg.training.step import Stepper

    run, sums, now = Stepper.run, PixelTerm.sums, [0]

    def noted(self: Stepper, step: int, *arguments: Any) -> Any:
        now[0] = step + 1
        return run(self, step, *arguments)

    def met(*arguments: Any) -> Any:
        if now[0] == number:
            meet()
        return sums(*arguments)

    Stepper.run = noted  # type: ignore[method-assign, assignment]
    PixelTerm.sums = met  # type: ignore[method-assign, assignment]


def _at_touches(meet: Callable[[], None]) -> None:
    """Where a file or folder of a checkpoint is made, opened, renamed or removed that has not got its name yet."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove") and "/.partial-" in str(arguments[0]):
            meet()

    sys.addaudithook(watch)


def _note_progress(done: int) -> None:
    from tiledseg.training.run_journal import Journal

    step = Journal.step

    def noted(self: Journal, line: dict[str, Any]) -> None:
        step(self, line)
        if line["step"] == done + 1:
            Path(NOTE).write_text(str(time.time()))

    Journal.step = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    from tiledseg.comm.session import leave

    os.chdir(sys.argv[1])
    leave(train(Order.parse(sys.argv[2])))
