"""One broken input: what is typed, and the words without which its error would not help."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path


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
