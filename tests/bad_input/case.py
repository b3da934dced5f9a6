"""One broken input: what is typed, the words without which its error would not help, and what a refusal looks like."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.small_files import tree


@dataclass(frozen=True)
class Case:
    """One broken input of one command. `typed` is what follows the command, with ROOT for the folder of materials."""

    name: str
    command: str
    typed: str
    words: tuple[str, ...]
    by_one_rank: bool = False
    """Only the rank that reads the damaged place can know of it; a launcher then ends the others."""
    least_ranks: int = 1
    """A job of fewer is refused for that already."""

    def arguments(self, root: Path) -> list[str]:
        return [word.replace("ROOT", str(root)) for word in shlex.split(self.typed)]

    def __str__(self) -> str:
        return f"{self.command}-{self.name}"


def train(name: str, typed: str, *words: str) -> Case:
    """A good run, but for `typed`, into a folder that is not there."""
    return Case(name, "train", f"--config ROOT/good.yaml --run.output ROOT/out {typed}", words)


def resume(name: str, typed: str, *words: str) -> Case:
    """The good run again, in the folder that it has left."""
    return Case(f"resume-{name}", "train", f"--config ROOT/good.yaml {typed}", words)


def predict(name: str, typed: str, *words: str) -> Case:
    """A good map, but for `typed`: the last of an option counts."""
    good = "--checkpoint ROOT/run --image ROOT/image.tif --output ROOT/map.tif --tiling.grid 2 --verbosity 0"
    return Case(name, "predict", f"{good} {typed}", words)


def evaluate(name: str, typed: str, *words: str) -> Case:
    """A good score, but for `typed`."""
    return Case(name, "evaluate", f"--prediction ROOT/second-labels.tif --labels ROOT/labels.tif {typed}", words)


def plan(name: str, typed: str, *words: str) -> Case:
    """A good plan, but for `typed`."""
    return Case(name, "plan", f"--size 1000 {typed}", words)


def scene(name: str, typed: str, *words: str) -> Case:
    """A good scene, but for `typed`."""
    return Case(name, "scene", f"--size 64 64 --image ROOT/scene.tif --labels ROOT/scene-labels.tif {typed}", words)


def tile(name: str, typed: str, *words: str) -> Case:
    """A good store, but for `typed`."""
    good = "--images ROOT/image.tif --labels ROOT/labels.tif --grid 2 --levels 2 --output ROOT/new.h5"
    return Case(name, "tile", f"{good} {typed}", words)


def export(name: str, typed: str, *words: str) -> Case:
    """A good export, but for `typed`."""
    return Case(name, "export", f"--checkpoint ROOT/run {typed}", words)


def command(case: Case) -> Callable[[Sequence[str]], int]:
    """The `main` of the case's command."""
    return importlib.import_module(f"tiledseg.{case.command}").main


@contextmanager
def check_refusal(case: Case, root: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The body leaves everything below `root` as it was, and one line that says what is wrong."""
    before = tree(root)
    capfd.readouterr()
    yield
    out, err = capfd.readouterr()
    assert out == ""
    check_line(case, err)
    assert tree(root) == before


def check_line(case: Case, err: str) -> None:
    """Standard error is one line of the right form with the case's words."""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert err.endswith("\n")
    missing = [word for word in case.words if word not in err]
    assert not missing, f"{missing} not in {err!r}"
    assert len(err) < 700, err
