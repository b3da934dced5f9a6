"""Forward and backward passes over a rank's parts: the interface, and the passes that run the whole network on a rank.

Step, validation and map run any kind of passes (see also `pipeline_passes` and `block_passes`).
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

Key = Callable[[int], DropoutKey]  # an image's number -> the key of its dropout


class Loss(Protocol):
    """The loss of a step's pieces. A loss that looks first needs sums over all pieces of the step (Dice, say)."""

    @property
    def looks_first(self) -> bool:
        """True if all pieces must pass `look`, and then `agree` be called, unless one call gets all of them."""

    def look(self, piece: Piece, sample: Sample) -> None:
        """Add a piece, without gradients, to the sums of the step."""

    def agree(self) -> None:
        """Add up the sums of all ranks, once a step. Collective if the loss looks first; else does nothing."""

    def __call__(self, pieces: Sequence[tuple[Piece, Sample]]) -> torch.Tensor:
        """Return the loss of pieces that are computed together, a scalar. Calls `agree` if that was not done."""


class Passes(ABC):
    """Passes over a mode's micro-batches. Methods that run the network are collective over the mode's ranks and stages.

    `loads`: this rank loads its parts. `loads_pixels`: it needs their pixels, besides labels and validity. `sends`:
    parts are copied to the device whole, else window by window.
    """

    mode: ReadMode
    loads = loads_pixels = sends = True

    @abstractmethod
    def train(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key, loss: Loss, reducer: GradientReducer
    ) -> float:
        """Differentiate the loss of every micro-batch of `parts`; return the seconds waited for samples.

        `samples`: those of `parts`, repeated `rounds` times.
        """

    @abstractmethod
    def rounds(self, parts: Sequence[Part], looks_first: bool) -> int:
        """Return how often `train` reads the samples of `parts`: twice if a forward round must look first."""

    @abstractmethod
    def outputs(self, samples: Iterator[Sample], parts: Sequence[Part]) -> Iterator[tuple[Piece, Sample]]:
        """Yield the network's output on every micro-batch of `parts`, in order, on the rank that computes it. Without
        gradients."""

    def pieces(self, parts: Sequence[Part]) -> int:
        """Return the number of pieces that `outputs` yields on this rank."""
        return len(self._micro_batches(parts))

    def figures(self) -> tuple[float, float, int, int] | None:
        """Return, for the last `train`, the seconds that this rank computed, the seconds of its passes, and the bytes
        and messages that it sent to other stages; None without stages."""
        return None

    def _micro_batches(self, parts: Iterable[Part]) -> list[MicroBatch]:
        return [micro_batch for part in parts for micro_batch in self.mode.micro_batches(part)]

    def _look(self, pieces: Iterable[tuple[Piece, Sample]], loss: Loss) -> None:
        """Pass all pieces to `loss.look`, computed without gradients or updates of running statistics; then agree."""
        with torch.no_grad(), still_statistics([self.mode.network]):
            for piece, sample in pieces:
                loss.look(piece, sample)
        loss.agree()


_Loaded = tuple[Sample, MicroBatch, torch.Tensor]  # with the network's input
_Batch = tuple[list[Sample], list[MicroBatch], Tensors]  # images of one shape between two runs of nodes


class SerialPasses(Passes):
    """Passes of the whole network, micro-batch by micro-batch; in training up to `batch` of one shape at once.

    The law holds for any `batch`: the loss and the dropout of each tile are its own, and the plan never batches norms
    over a batch or layers that depend on their place (`planning.run.memory`).
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
                pieces.clear()  # the outputs are freed as soon as the backward pass has used them
                total.backward()
        return timed.seconds

    def rounds(self, parts: Sequence[Part], looks_first: bool) -> int:
        return 2 if looks_first and self.pieces(parts) > 1 else 1

    def _batches(self, samples: Iterable[Sample], most: int | None = None) -> Iterator[list[_Loaded]]:
        """Yield micro-batches in order, in batches of one shape that run at once."""
        held: list[_Loaded] = []
        for sample in samples:
            inputs = self.mode.inputs(sample)
            for micro_batch in self.mode.micro_batches(Part(sample.image, sample.tile)):
                one = sample, micro_batch, next(inputs)
                if held and held[0][2].shape != one[2].shape:
                    yield held
                    held = []
                held.append(one)
                del one  # the input is freed as soon as the network has used it
                if len(held) == (most or self._batch):
                    yield held
                    held = []
        if held:
            yield held

    def _run(self, loaded: list[_Loaded], key: Key | None = None) -> list[tuple[Piece, Sample]]:
        """Compute outputs on micro-batches of one shape as a batch. Empties `loaded`. `key`: given in training."""
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

    def outputs(self, samples: Iterator[Sample], parts: Sequence[Part]) -> Iterator[tuple[Piece, Sample]]:
        return self._outputs(samples, most=1)

    def _outputs(
        self, samples: Iterable[Sample], key: Key | None = None, most: int | None = None
    ) -> Iterator[tuple[Piece, Sample]]:
        for loaded in self._batches(samples, most):
            with _work(loaded):
                yield from self._run(loaded, key)


def _work(loaded: Sequence[_Loaded]) -> doing:
    """Return the context that names a batch's first tile for the watch."""
    return doing("tile %d of image %d", loaded[0][1].tile.index, loaded[0][0].image)


def batched(inputs_BCHW: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate inputs of one shape, channels last; `unbatched` splits the network's outputs again."""
    if len(inputs_BCHW) == 1:
        return inputs_BCHW[0]
    return torch.cat(inputs_BCHW).contiguous(memory_format=torch.channels_last)


def unbatched(output_BKHW: torch.Tensor) -> Sequence[torch.Tensor]:
    return (output_BKHW,) if len(output_BKHW) == 1 else output_BKHW.split(1)


class StepPasses(SerialPasses):
    """Serial passes that train all images of a step together, for batch norms over the step's images.

    A training batch norm takes its statistics over all pixels of a step. So the images of a rank run up to such a norm,
    batch by batch of one shape; batches follow from the step alone. The norm runs on all of them, together with other
    ranks' images; then they run on, until one backward pass. Gradients of weights are summed in float64 over the
    batches and the norm's images: they do not depend on the number of ranks.

    Nothing can deadlock: every rank makes the norms' sums over `axes.weights` in the order of the nodes, backward in
    reverse. A rank without an image sums zeros at the same places. The sums of gradients start after that.
    """

    mode: LayerMode

    def __init__(self, mode: LayerMode) -> None:
        super().__init__(mode)
        layers = mode.network.graph.layers
        self._norms = tuple(k for k, layer in enumerate(layers) if layer.statistics == "batch")  # over a step's images
        self._lending = Lending(mode.network.layers.values())
        self._dropouts = nn.ModuleList(dropouts(mode.network))  # each batch sets their keys before each run of nodes

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
                del outputs, made  # their last tensors would live through the backward pass
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
        return 1  # one call of the loss gets all pieces


def read_ahead(passes: Passes, dataset: Dataset, parts: Iterable[Part], threads: int) -> Iterator[Sample]:
    """Yield the samples of a rank's `parts` in order, one a thread loaded and sent ahead; none if it loads none."""
    pixels = passes.loads_pixels
    send = sender(passes.mode.device) if passes.sends else lambda sample: sample
    wanted = parts if passes.loads else ()
    return prefetch(wanted, lambda one: send(dataset.load(one.image, one.tile, pixels, one.draw)), threads, threads)


class TimedSamples:
    """An iterator of samples that sums up the seconds that its consumer waits."""

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
