"""Forward and backward passes over a rank's parts: the whole network on each micro-batch in turn, or in a pipeline.

The step, the validation and the map do not know which kind of passes they run (see `pipeline_passes`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple, Protocol

import torch

from tiledseg.comm.watching.doing import doing
from tiledseg.execution.halos.halo_modes import ReadMode
from tiledseg.execution.halos.part import MicroBatch, Part, Piece
from tiledseg.execution.input.carrying import sender
from tiledseg.gradients import GradientReducer
from tiledseg.models.dropout import DropoutKey, set_dropout_key
from tiledseg.models.notes import still_statistics
from tiledseg.raster.prefetch import prefetch
from tiledseg.raster.samples.dataset import Dataset, Sample

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

    mode: ReadMode

    @property
    def loads(self) -> bool:
        """Whether this rank has to load its parts: samples are drawn only where it is true."""

    @property
    def loads_pixels(self) -> bool:
        """Whether it needs their pixels, besides labels and validity."""

    @property
    def sends(self) -> bool:
        """Whether parts go to the device whole; else window by window."""

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


class _Loaded(NamedTuple):
    """A micro-batch with its sample and the network's input."""

    sample: Sample
    micro_batch: MicroBatch
    x_BCHW: torch.Tensor


class SerialPasses:
    """The whole network on this rank, micro-batch by micro-batch; while training, up to `batch` of one shape at once.

    The law holds for any `batch`: losses are taken of each tile by itself and added up, dropout is drawn for each, and
    norms that measure the batch are never run so (`planning.run.fit`).
    """

    loads = loads_pixels = sends = True

    def __init__(self, mode: ReadMode, batch: int = 1) -> None:
        self.mode = mode
        self._batch = batch

    def train(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key, loss: Loss, reducer: GradientReducer
    ) -> float:
        timed = TimedSamples(samples)
        if self.rounds(parts, loss.looks_first) > 1:
            with torch.no_grad(), still_statistics([self.mode.network]):
                for piece, sample in chain.from_iterable(self._each(timed, parts, key)):
                    loss.look(piece, sample)
            loss.agree()
        left = self.pieces(parts)
        for pieces in self._each(timed, parts, key):
            left -= len(pieces)
            if left == 0:
                reducer.overlap()
            total = loss(pieces)
            pieces.clear()  # the loss alone decides how long it needs the network's output
            total.backward()
        return timed.seconds

    def rounds(self, parts: Sequence[Part], looks_first: bool) -> int:
        return 2 if looks_first and self.pieces(parts) > 1 else 1

    def _each(self, samples: Iterator[Sample], parts: Sequence[Part], key: Key) -> Iterator[list[tuple[Piece, Sample]]]:
        """The pieces of a step's parts: those of a batch, one batch after the other."""
        for loaded in self._batches(islice(samples, len(parts))):
            own = [one.sample for one in loaded]
            set_dropout_key(self.mode.network, *(key(sample.image) for sample in own))
            with doing("tile %d of image %d", loaded[0].micro_batch.tile.index, own[0].image):
                yield list(zip(self._run(loaded), own, strict=True))

    def _batches(self, samples: Iterator[Sample]) -> Iterator[list[_Loaded]]:
        """Micro-batches in their order, as many of one shape as may run at once."""
        held: list[_Loaded] = []
        for sample in samples:
            inputs = self.mode.inputs(sample)
            for micro_batch in self.mode.micro_batches(Part(sample.image, sample.tile)):
                one = _Loaded(sample, micro_batch, next(inputs))
                if held and held[0].x_BCHW.shape != one.x_BCHW.shape:
                    yield held
                    held = []
                held.append(one)
                del one  # the network alone decides how long it needs its input
                if len(held) == self._batch:
                    yield held
                    held = []
        if held:
            yield held

    def _run(self, loaded: list[_Loaded]) -> list[Piece]:
        """The network's outputs on micro-batches of one shape, computed as one batch. `loaded` is used up."""
        graph, micro_batches = self.mode.network.graph, [one.micro_batch for one in loaded]
        tensors = {0: batched([one.x_BCHW for one in loaded])}
        loaded.clear()
        self.mode.run_nodes(micro_batches[0], tensors, 0, len(graph))
        outputs = zip(*(unbatched(tensors.pop(result)) for result in graph.results), strict=True)
        return [one.piece(*outputs_BKHW) for one, outputs_BKHW in zip(micro_batches, outputs, strict=True)]

    def outputs(self, samples: Iterator[Sample], parts: Sequence[Part]) -> Iterator[tuple[Sample, Piece]]:
        for sample in samples:
            inputs = self.mode.inputs(sample)
            for micro_batch in self.mode.micro_batches(Part(sample.image, sample.tile)):
                (piece,) = self._run([_Loaded(sample, micro_batch, next(inputs))])
                yield sample, piece

    def pieces(self, parts: Sequence[Part]) -> int:
        return sum(len(self.mode.micro_batches(part)) for part in parts)

    def figures(self) -> None:
        return None


def batched(inputs_BCHW: list[torch.Tensor]) -> torch.Tensor:
    """Inputs of one shape as one, channels last; `unbatched` takes what the network makes of it apart again."""
    if len(inputs_BCHW) == 1:
        return inputs_BCHW[0]
    return torch.cat(inputs_BCHW).contiguous(memory_format=torch.channels_last)


def unbatched(output_BKHW: torch.Tensor) -> Sequence[torch.Tensor]:
    return (output_BKHW,) if len(output_BKHW) == 1 else output_BKHW.split(1)


def read_ahead(passes: Passes, dataset: Dataset, parts: Iterable[Part], threads: int, depth: int) -> Iterator[Sample]:
    """The samples of a rank's `parts` in order, `depth` of them loaded ahead, and sent to the device; none where it has
    to load none."""
    pixels = passes.loads_pixels
    send = sender(passes.mode.device) if passes.sends else lambda sample: sample
    wanted = parts if passes.loads else ()
    return prefetch(wanted, lambda one: send(dataset.load(one.image, one.tile, pixels, one.draw)), threads, depth)


class TimedSamples:
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
