"""Forward and backward passes over a rank's parts: the whole network on each micro-batch in turn, or in a pipeline.

The step, the validation and the map do not know which kind of passes they run (see `pipeline_passes`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tiledseg.comm.doing import doing, ticking
from tiledseg.execution.halo_modes import HaloMode, Part, Piece
from tiledseg.gradients import GradientReducer
from tiledseg.models.dropout import DropoutKey, set_dropout_key
from tiledseg.models.still import still_statistics
from tiledseg.raster.dataset import Dataset, Sample
from tiledseg.raster.prefetch import prefetch

Key = Callable[[int], DropoutKey]  # what the dropout of an image depends on


class Loss(Protocol):
    """What to differentiate of a step's pieces. Where it looks first, it wants the sums of the step before it says."""

    @property
    def looks_first(self) -> bool:
        """Whether it is to be shown all pieces beforehand, and then to `agree`, unless one call has them all."""

    def look(self, piece: Piece, sample: Sample) -> None:
        """Adds a piece, which has no gradients, to the sums of the step."""

    def agree(self) -> None:
        """The ranks add up what each has looked at; once a step. Collective where it looks first, else nothing."""

    def __call__(self, pieces: Sequence[tuple[Piece, Sample]]) -> torch.Tensor:
        """What to differentiate of pieces that are at hand together, a scalar. It agrees where that is not done."""


@dataclass(frozen=True)
class StageFigures:
    """What a pipeline's rank has done in a step: seconds that it computed, and its passes took; what it has sent."""

    busy_seconds: float
    seconds: float
    bytes: int
    messages: int


class Passes(Protocol):
    """Runs the network on a mode's micro-batches. What runs something is collective as the mode is, and over stages."""

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
        """Differentiates the loss of every micro-batch of `parts`; the seconds that were waited for samples.

        `samples` come as often as `rounds` says.
        """

    def rounds(self, parts: Sequence[Part], looks_first: bool) -> int:
        """How often `train` takes the samples of `parts`: twice where it has to go forward once more, to look first."""

    def outputs(self, samples: Iterator[Sample], parts: Sequence[Part]) -> Iterator[tuple[Sample, Piece]]:
        """The network's output on every micro-batch of `parts`, in order, where it is made. Call without gradients."""

    def pieces(self, parts: Sequence[Part]) -> int:
        """How many pieces `outputs` gives on this rank."""

    def figures(self) -> StageFigures | None:
        """Of the last `train`; None without stages."""


class SerialPasses:
    """The whole network on this rank, micro-batch by micro-batch."""

    loads = loads_pixels = True

    def __init__(self, mode: HaloMode) -> None:
        self.mode = mode

    def train(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key, loss: Loss, reducer: GradientReducer
    ) -> float:
        timed = Timed(samples)
        if self.rounds(parts, loss.looks_first) > 1:
            with torch.no_grad(), still_statistics([self.mode.network]):
                for piece, sample in self._each(timed, parts, key):
                    loss.look(piece, sample)
            loss.agree()
        left = self.pieces(parts)
        for piece, sample in self._each(timed, parts, key):
            if left == 1:
                reducer.overlap()
            loss([(piece, sample)]).backward()
            left -= 1
        return timed.seconds

    def rounds(self, parts: Sequence[Part], looks_first: bool) -> int:
        return 2 if looks_first and self.pieces(parts) > 1 else 1

    def _each(self, samples: Iterator[Sample], parts: Sequence[Part], key: Key) -> Iterator[tuple[Piece, Sample]]:
        """The pieces of a step's parts, one after the other."""
        for _ in parts:
            sample = next(samples)
            set_dropout_key(self.mode.network, key(sample.image))
            with doing("tile %d of image %d", sample.tile.index, sample.image):
                for piece in ticking(self._pieces(sample)):
                    yield piece, sample

    def outputs(self, samples: Iterator[Sample], parts: Sequence[Part]) -> Iterator[tuple[Sample, Piece]]:
        for sample in samples:
            for piece in self._pieces(sample):
                yield sample, piece

    def pieces(self, parts: Sequence[Part]) -> int:
        return sum(len(self.mode.micro_batches(part)) for part in parts)

    def figures(self) -> None:
        return None

    def _pieces(self, sample: Sample) -> Iterator[Piece]:
        graph = self.mode.network.graph
        micro_batches = self.mode.micro_batches(Part(sample.image, sample.tile))
        for micro_batch, x_BCHW in zip(micro_batches, self.mode.inputs(sample), strict=True):
            tensors = {0: x_BCHW}
            self.mode.run_nodes(micro_batch, tensors, 0, len(graph))
            yield micro_batch.piece(*map(tensors.pop, graph.results))


def read_ahead(passes: Passes, dataset: Dataset, parts: Iterable[Part], threads: int, depth: int) -> Iterator[Sample]:
    """The samples of a rank's `parts` in order, `depth` of them loaded ahead; none where it has to load none."""
    pixels = passes.loads_pixels
    wanted = parts if passes.loads else ()
    return prefetch(wanted, lambda part: dataset.load(part.image, part.tile, pixels, part.draw), threads, depth)


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
