"""Forward and backward passes over a rank's parts: the whole network on each micro-batch in turn, or in a pipeline.

The step, the validation and the map do not know which kind of passes they run (see `pipeline_passes`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import torch
from torch import nn

from tiledseg.comm.doing import doing
from tiledseg.execution.carrying import sender
from tiledseg.execution.halo_modes import LayerMode, MicroBatch, Part, Piece, ReadMode
from tiledseg.gradients import GradientReducer
from tiledseg.memory.second_run import still_statistics
from tiledseg.models.dropout import DropoutKey, dropouts, set_dropout_key
from tiledseg.models.frozen import Lending
from tiledseg.models.network import Tensors
from tiledseg.raster.mirrored_reader import prefetch
from tiledseg.raster.samples.dataset import Dataset, Sample

Key = Callable[[int], DropoutKey]  # what the dropout of an image depends on


class Loss(Protocol):
    """The scalar to differentiate of a step's pieces.

    Where it looks first, it wants the sums of the step before it says.
    """

    @property
    def looks_first(self) -> bool:
        """True if it is to be shown all pieces beforehand, and then to `agree`, unless one call has them all."""

    def look(self, piece: Piece, sample: Sample) -> None:
        """Add a piece, which has no gradients, to the sums of the step."""

    def agree(self) -> None:
        """Add up what each rank has looked at; once a step. Collective where it looks first, else nothing."""

    def __call__(self, pieces: Sequence[tuple[Piece, Sample]]) -> torch.Tensor:
        """Return the scalar to differentiate of pieces that are at hand together. It agrees where that is not done."""


class Passes(ABC):
    """Passes over a mode's micro-batches. Methods that run the network are collective as the mode is, over stages too.

    `loads`: this rank loads its parts; samples are drawn only where it is true. `loads_pixels`: it needs their pixels,
    besides labels and validity. `sends`: parts go to the device whole; else window by window.
    """

    mode: ReadMode
    loads = loads_pixels = sends = True

    @abstractmethod
    def train(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key, loss: Loss, reducer: GradientReducer
    ) -> float:
        """Differentiate the loss of every micro-batch of `parts`; return the seconds that were waited for samples.

        `samples` come as often as `rounds` says.
        """

    @abstractmethod
    def rounds(self, parts: Sequence[Part], looks_first: bool) -> int:
        """Return how often `train` takes the samples of `parts`: twice where it has to look first by itself."""

    @abstractmethod
    def outputs(self, samples: Iterator[Sample], parts: Sequence[Part]) -> Iterator[tuple[Sample, Piece]]:
        """Yield the network's output on every micro-batch of `parts`, in order, where it is made. Without gradients."""

    def pieces(self, parts: Sequence[Part]) -> int:
        """Count the pieces that `outputs` gives on this rank."""
        return len(self._micro_batches(parts))

    def figures(self) -> tuple[float, float, int, int] | None:
        """Return the seconds that this rank computed in the last `train`, and that its passes took, and the bytes and
        messages that it sent to other stages; None without stages."""
        return None

    def _micro_batches(self, parts: Iterable[Part]) -> list[MicroBatch]:
        return [micro_batch for part in parts for micro_batch in self.mode.micro_batches(part)]

    def _look(self, pieces: Iterable[tuple[Piece, Sample]], loss: Loss) -> None:
        """Show a loss all pieces beforehand, which are made without gradients and change no statistics."""
        with torch.no_grad(), still_statistics([self.mode.network]):
            for piece, sample in pieces:
                loss.look(piece, sample)
        loss.agree()


_Loaded = tuple[Sample, MicroBatch, torch.Tensor]  # with the network's input
_Batch = tuple[list[Sample], list[MicroBatch], Tensors]  # images of one shape on their way through the network


class SerialPasses(Passes):
    """The whole network on this rank, micro-batch by micro-batch; while training, up to `batch` of one shape at once.

    The law holds for any `batch`: losses are taken of each tile by itself and added up, dropout is drawn for each, and
    norms that measure the batch are never run so (`planning.run.fit`).
    """

    def __init__(self, mode: ReadMode, batch: int = 1) -> None:
        self.mode = mode
        self._batch = batch

    def train(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key, loss: Loss, reducer: GradientReducer
    ) -> float:
        timed = TimedSamples(samples)
        if self.rounds(parts, loss.looks_first) > 1:
            self._look(self._outputs(islice(timed, len(parts)), key), loss)
        left = self.pieces(parts)
        for batch in self._batches(islice(timed, len(parts))):
            with _work(batch):
                pieces = self._run(batch, key)
                left -= len(pieces)
                if left == 0:
                    reducer.overlap()
                total = loss(pieces)
                pieces.clear()  # the loss alone decides how long it needs the network's output
                total.backward()
        return timed.seconds

    def rounds(self, parts: Sequence[Part], looks_first: bool) -> int:
        return 2 if looks_first and self.pieces(parts) > 1 else 1

    def _batches(self, samples: Iterable[Sample], most: int | None = None) -> Iterator[list[_Loaded]]:
        """Yield micro-batches in their order, as many of one shape as may run at once."""
        held: list[_Loaded] = []
        for sample in samples:
            inputs = self.mode.inputs(sample)
            for micro_batch in self.mode.micro_batches(Part(sample.image, sample.tile)):
                one = sample, micro_batch, next(inputs)
                if held and held[0][2].shape != one[2].shape:
                    yield held
                    held = []
                held.append(one)
                del one  # the network alone decides how long it needs its input
                if len(held) == (most or self._batch):
                    yield held
                    held = []
        if held:
            yield held

    def _run(self, loaded: list[_Loaded], key: Key | None = None) -> list[tuple[Piece, Sample]]:
        """Compute outputs on micro-batches of one shape as a batch; `loaded` is used up. `key`: they are trained on."""
        samples, micro_batches = [sample for sample, _, _ in loaded], [micro_batch for _, micro_batch, _ in loaded]
        tensors = {0: batched([x_BCHW for _, _, x_BCHW in loaded])}
        loaded.clear()
        graph = self.mode.network.graph
        if key is not None:
            set_dropout_key(self.mode.network, *(key(sample.image) for sample in samples))
        self.mode.run_nodes(micro_batches[0], tensors, 0, len(graph))
        outputs = zip(*(unbatched(tensors.pop(result)) for result in graph.results), strict=True)
        pieces = (one.piece(*outputs_BKHW) for one, outputs_BKHW in zip(micro_batches, outputs, strict=True))
        return list(zip(pieces, samples, strict=True))

    def outputs(self, samples: Iterator[Sample], parts: Sequence[Part]) -> Iterator[tuple[Sample, Piece]]:
        for piece, sample in self._outputs(samples, most=1):
            yield sample, piece

    def _outputs(
        self, samples: Iterable[Sample], key: Key | None = None, most: int | None = None
    ) -> Iterator[tuple[Piece, Sample]]:
        for loaded in self._batches(samples, most):
            with _work(loaded):
                yield from self._run(loaded, key)


def _work(loaded: Sequence[_Loaded]) -> doing:
    """Return the words for the watch."""
    return doing("tile %d of image %d", loaded[0][1].tile.index, loaded[0][0].image)


def batched(inputs_BCHW: list[torch.Tensor]) -> torch.Tensor:
    """Join inputs of one shape, channels last; `unbatched` takes what the network makes of it apart again."""
    if len(inputs_BCHW) == 1:
        return inputs_BCHW[0]
    return torch.cat(inputs_BCHW).contiguous(memory_format=torch.channels_last)


def unbatched(output_BKHW: torch.Tensor) -> Sequence[torch.Tensor]:
    return (output_BKHW,) if len(output_BKHW) == 1 else output_BKHW.split(1)


class StepPasses(SerialPasses):
    """Serial passes, but for training: there all images of a step go through the network together, node by node.

    A batch norm that learns takes its statistics over all pixels of a step. So the images of a rank run up to such a
    norm, a batch of one shape after the other, which the step alone makes. The norm takes all of them, with those of
    the other ranks, and they run on, until one backward pass. Each batch has a use of the weights of its own, summed in
    float64, as the norm's are: gradients are alike on any number of ranks.

    Nothing can deadlock: every rank makes the norms' sums over `axes.weights` in the order of the nodes, and backward
    in the opposite one. A rank without an image sums zeros at the same places. The sums of gradients start after that.
    """

    mode: LayerMode

    def __init__(self, mode: LayerMode) -> None:
        super().__init__(mode)
        layers = mode.network.graph.layers
        self._norms = tuple(k for k, layer in enumerate(layers) if layer.statistics == "batch")  # over a step's images
        self._lending = Lending(mode.network.layers.values())
        self._dropouts = nn.ModuleList(dropouts(mode.network))  # each image tells them before each run of nodes

    def train(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key, loss: Loss, reducer: GradientReducer
    ) -> float:
        timed, graph = TimedSamples(samples), self.mode.network.graph
        nodes, batches = len(graph), list[_Batch]()
        for batch in self.mode.batches(parts):
            own = [next(timed) for _ in batch]
            inputs_BCHW = [x_BCHW for sample in own for x_BCHW in self.mode.inputs(sample)]
            batches.append((own, self._micro_batches(batch), {0: batched(inputs_BCHW)}))
            del inputs_BCHW
        with doing("a step of %d images", len(parts)):
            first = 0
            for stop in (*self._norms, nodes):
                for own, micro_batches, tensors in batches:
                    set_dropout_key(self._dropouts, *(key(sample.image) for sample in own))
                    with self._lending.lend(first, stop, reducer.use):
                        self.mode.run_nodes(micro_batches[0], tensors, first, stop)
                if stop < nodes:
                    with self._lending.lend(stop, stop + 1, lambda parameter: reducer.use(parameter, torch.float64)):
                        self.mode.norm_together(stop, [(micro[0], tensors) for _, micro, tensors in batches])
                first = stop + 1
            pieces: list[tuple[Piece, Sample]] = []
            for own, micro_batches, tensors in batches:
                outputs = zip(*(unbatched(tensors.pop(result)) for result in graph.results), strict=True)
                made = (one.piece(*each) for one, each in zip(micro_batches, outputs, strict=True))
                pieces += zip(made, own, strict=True)
                del outputs, made  # they hold the last tensors, which would live through the backward pass
            total = loss(pieces)
            del pieces
            if batches:
                total.backward()
            else:
                for k in reversed(self._norms):
                    if graph.wants_gradient[graph.sources[k][0]]:  # else autograd sums nothing on the other ranks
                        self.mode.no_gradients(k)
        return timed.seconds

    def rounds(self, parts: Sequence[Part], looks_first: bool) -> int:
        return 1  # all are at hand together


def read_ahead(passes: Passes, dataset: Dataset, parts: Iterable[Part], threads: int) -> Iterator[Sample]:
    """Yield the samples of a rank's `parts` in order, one a thread loaded ahead and sent; none where it loads none."""
    pixels = passes.loads_pixels
    send = sender(passes.mode.device) if passes.sends else lambda sample: sample
    wanted = parts if passes.loads else ()
    return prefetch(wanted, lambda one: send(dataset.load(one.image, one.tile, pixels, one.draw)), threads, threads)


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
