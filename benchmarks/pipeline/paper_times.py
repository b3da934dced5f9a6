"""Times of every layer of the paper's networks, from a file: measured by the program of commit 34d75aec."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tiledseg.architecture.presets import PRESETS


@dataclass(frozen=True, order=True)
class Case:
    """A network, and the pixels of a side of its square micro-batches."""

    network: str
    model: str
    size: int

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.network}/{self.model}/{self.size}"


class LayerTime(NamedTuple):
    """Seconds of a layer for one micro-batch, as a training step takes them."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Measurement:
    """Seconds of each layer, forward and backward, of each case; and what they were measured on."""

    machine: str
    base_channels: int
    repeats: int
    cases: dict[Case, tuple[LayerTime, ...]]

    @staticmethod
    def load(path: Path) -> Measurement:
        """Read a file."""
        found = json.loads(path.read_text())
        cases = {}
        for key, pairs in found["seconds"].items():
            network, model, size = key.split("/")
            cases[Case(network, model, int(size))] = tuple(LayerTime(*pair) for pair in pairs)
        return Measurement(**found["about"], cases=cases)


def legal_size(model: str, size: int) -> int:
    """The least size of so many pixels or more that the poolings divide."""
    unit = 1 << (PRESETS[model].levels - 1)
    return -(-size // unit) * unit
