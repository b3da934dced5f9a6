"""Forward and backward passes over a rank's parts, the whole network on each unit in turn; pipelines do the same.

The step, the validation and the map do not know which kind of passes they run (see `pipeline_passes`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tiledseg.comm.doing import doing, ticking
from tiledseg.execution.halo_modes import HaloMode, Part, Piece
from tiledseg.gradients import GradientReducer
from tiledseg.models.dropout import DropoutKey, set_dropout_key
from tiledseg.raster.dataset import Sample

Loss = Callable[[Piece, Sample], torch.Tensor]  # what to differentiate of a piece
Key = Callable[[int], DropoutKey]  # what the dropout of an image depends on


@dataclass(frozen=True)
class StageFigures:
    """What a pipeline's rank has done in a step: seconds that it computed, and its passes took; what it has sent."""

    busy_seconds: float
    seconds: float
    bytes: int
    messages: int


class Passes(Protocol):
    """Runs the network on a mode's units. What runs something is collective as the mode is, and over stages."""

    mode: HaloMode

    @property
    def loads(self) -> bool:
        """Whether this rank has to load its parts: samples are drawn only where it is true."""

    @property
    def loads_pixels(self) -> bool:
        """Whether it needs their pixels, besides labels and validity."""

    def train(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key, loss: Loss, reducer: GradientReducer
    ) -> float:
        """Differentiates the loss of every unit of `parts`; the seconds that were waited for samples."""

    def outputs(self, samples: Iterator[Sample], parts: Sequence[Part]) -> Iterator[tuple[Sample, Piece]]:
        """The network's output on every unit of `parts`, in order, where it is made. Call it without gradients."""

    def pieces(self, parts: Sequence[Part]) -> int:
        """How many pieces `outputs` gives on this rank."""

    def figures(self) -> StageFigures | None:
        """Of the last `train`; None without stages."""


class SerialPasses:
    """The whole network on this rank, unit by unit."""

    loads = loads_pixels = True

    def __init__(self, mode: HaloMode) -> None:
        self.mode = mode

    def train(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key, loss: Loss, reducer: GradientReducer
    ) -> float:
        """As the protocol says."""
        timed = Timed(samples)
        left = self.pieces(parts)
        for _ in parts:
            sample = next(timed)
            set_dropout_key(self.mode.network, key(sample.image))
            with doing("tile %d of image %d", sample.tile.index, sample.image):
                for piece in ticking(self._pieces(sample)):
                    if left == 1:
                        reducer.overlap()
                    loss(piece, sample).backward()
                    left -= 1
        return timed.seconds

    def outputs(self, samples: Iterator[Sample], parts: Sequence[Part]) -> Iterator[tuple[Sample, Piece]]:
        """As the protocol says."""
        for sample in samples:
            for piece in self._pieces(sample):
                yield sample, piece

    def pieces(self, parts: Sequence[Part]) -> int:
        """As the protocol says."""
        return sum(len(self.mode.units(part)) for part in parts)

    def figures(self) -> None:
        """None: there are no stages."""

    def _pieces(self, sample: Sample) -> Iterator[Piece]:
        layers = len(self.mode.network.descriptions)
        units = self.mode.units(Part(sample.image, sample.tile))
        for unit, x_BCHW in zip(units, self.mode.inputs(sample), strict=True):
            yield unit.piece(self.mode.run_layers(unit, x_BCHW, {}, 0, layers))


class Timed:
    """An iterator of samples that counts the seconds in which its consumer has waited."""

    def __init__(self, samples: Iterator[Sample]) -> None:
        self._samples = samples
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        asked = time.perf_counter()
        with doing("reading a tile"):
            sample = next(self._samples)
        self.seconds += time.perf_counter() - asked
        return sample
