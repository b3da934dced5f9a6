"""One broken input: what is typed, the words without which its error would not help, and what a refusal looks like."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One broken input of one command. `typed` is what follows the command, with ROOT for the folder of materials."""

    name: str
    command: str
    typed: str
    words: tuple[str, ...]
    least_ranks: int = 1
    """A job of fewer is refused for that already."""

    def arguments(self, root: Path) -> list[str]:
        return [word.replace("ROOT", str(root)) for word in shlex.split(self.typed)]

    def __str__(self) -> str:
        return f"{self.command}-{self.name}"


def _like(command: str, good: str, before: str = "", least_ranks: int = 1) -> Callable[..., Case]:
    """A function of a name, what is typed, and words: a good command but for `typed`; the last of an option counts."""
    return lambda name, typed, *words: Case(before + name, command, f"{good} {typed}", words, least_ranks)


GOOD_RUN = "--config ROOT/good.yaml --run.output ROOT/out"  # a folder that is not there
GOOD_MAP = "--checkpoint ROOT/run --image ROOT/image.tif --output ROOT/map.tif --tiling.grid 2 --verbosity 0"
train, train_on_three = _like("train", GOOD_RUN), _like("train", GOOD_RUN, least_ranks=3)
predict, predict_on_three = _like("predict", GOOD_MAP), _like("predict", GOOD_MAP, least_ranks=3)
resume = _like("train", "--config ROOT/good.yaml", "resume-")  # in the folder that the good run has left
evaluate = _like("evaluate", "--prediction ROOT/second-labels.tif --labels ROOT/labels.tif")
plan = _like("plan", "--size 1000")
scene = _like("scene", "--size 64 64 --image ROOT/scene.tif --labels ROOT/scene-labels.tif")
tile = _like("tile", "--images ROOT/image.tif --labels ROOT/labels.tif --grid 2 --levels 2 --output ROOT/new.h5")
export = _like("export", "--checkpoint ROOT/run")


def command(case: Case) -> Callable[[Sequence[str]], int]:
    """The `main` of the case's command."""
    return importlib.import_module(f"tiledseg.{case.command}").main


def check_line(case: Case, err: str) -> None:
    """Standard error is one line of the right form with the case's words."""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert err.endswith("\n")
    missing = [word for word in case.words if word not in err]
    assert not missing, f"{missing} not in {err!r}"
    assert len(err) < 700, err
