"""Forward and backward passes over a rank's parts: the interface, and the passes that run the whole network on a rank.

Step, validation and map run any kind of passes (see also `pipeline_passes` and `block_passes`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice, repeat
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
Loaded = tuple[Sample, MicroBatch, torch.Tensor | None]  # with the network's input on a rank that loads pixels
_Batch = tuple[list[Sample], list[MicroBatch], Tensors]  # images of one shape between two runs of nodes


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
    ) -> None:
        """Differentiate the loss of every micro-batch of `parts`. `samples`: those of `parts`, repeated `rounds`
        times."""

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

    def _loaded(self, samples: Iterable[Sample]) -> Iterator[Loaded]:
        """Yield the micro-batches of loaded parts. Each input is freed as soon as the network has used it."""
        for sample in samples:
            micro_batches = self.mode.micro_batches(Part(sample.image, sample.tile))
            inputs = self.mode.inputs(sample) if self.loads_pixels else repeat(None)
            for micro_batch in micro_batches:
                yield sample, micro_batch, next(inputs)

    def _look(self, pieces: Iterable[tuple[Piece, Sample]], loss: Loss) -> None:
        """Pass all pieces to `loss.look`, computed without gradients or updates of running statistics; then agree."""
        with torch.no_grad(), still_statistics([self.mode.network]):
            for piece, sample in pieces:
                loss.look(piece, sample)
        loss.agree()


class SerialPasses(Passes):
    """Passes of the whole network in batches, which the mode makes of micro-batches of one shape.

    The law holds for any batches: the loss and the dropout of each tile are its own, and the plan never batches norms
    over a batch or layers that depend on their place (`planning.run.memory`).

    `together`: all images of a step train together, for batch norms over the step's images. Such a norm takes its
    statistics over all pixels of a step. So the images of a rank run up to the norm, batch by batch. The norm runs on
    all of them, together with other ranks' images; then they run on, until one backward pass. Gradients of weights are
    summed in float64 over the batches and the norm's images: they do not depend on the number of ranks.

    Nothing can deadlock: every rank makes the norms' sums over `axes.weights` in the order of the nodes, backward in
    reverse. A rank without an image sums zeros at the same places. The sums of gradients start after that.
    """

    def __init__(self, mode: ReadMode, together: bool = False) -> None:
        self.mode = mode
        self._dropouts = nn.ModuleList(dropouts(mode.network))  # each batch sets their keys before each run of nodes
        self._shared = mode if together and isinstance(mode, LayerMode) else None
        layers = mode.network.graph.layers if self._shared else ()
        self._norms = tuple(k for k, layer in enumerate(layers) if layer.statistics == "batch")  # over a step's images
        self._lending = Lending(mode.network.layers.values())

    def train(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key, loss: Loss, reducer: GradientReducer
    ) -> None:
        sizes = self.mode.batch_sizes(parts)
        if self.rounds(parts, loss.looks_first) > 1:
            self._look(self._outputs(islice(samples, len(parts)), sizes, key), loss)
        loaded = self._loaded(samples)
        groups = [sizes] if self._shared else [[size] for size in sizes]
        for number, group in enumerate(groups, 1):
            batches = [_batch(loaded, size) for size in group]
            with self._work(batches):
                self._run(batches, key, reducer)
                pieces = [piece for batch in batches for piece in self._pieces(batch)]
                if number == len(groups) and not self._shared:
                    reducer.overlap()
                total = loss(pieces)
                pieces.clear()  # the outputs are freed as soon as the backward pass has used them
                if batches:
                    total.backward()
                elif self._shared:
                    self._take_part(self._shared)

    def rounds(self, parts: Sequence[Part], looks_first: bool) -> int:
        return 2 if looks_first and not self._shared and self.pieces(parts) > 1 else 1

    def outputs(self, samples: Iterator[Sample], parts: Sequence[Part]) -> Iterator[tuple[Piece, Sample]]:
        return self._outputs(samples, [1] * self.pieces(parts))

    def _outputs(
        self, samples: Iterator[Sample], sizes: Sequence[int], key: Key | None = None
    ) -> Iterator[tuple[Piece, Sample]]:
        loaded = self._loaded(samples)
        for size in sizes:
            batch = _batch(loaded, size)
            with self._work([batch]):
                self._run([batch], key)
                yield from self._pieces(batch)

    def _run(self, batches: Sequence[_Batch], key: Key | None, reducer: GradientReducer | None = None) -> None:
        """Run all nodes on the batches. `key`, `reducer`: given in training."""
        nodes, first = len(self.mode.network.graph), 0
        together = self._shared if reducer is not None else None
        for stop in (*(self._norms if together else ()), nodes):
            for samples, micro_batches, tensors in batches:
                if key is not None:
                    set_dropout_key(self._dropouts, *(key(sample.image) for sample in samples))
                with self._lending.lend(first, stop, reducer.use) if together and reducer else nullcontext():
                    self.mode.run_nodes(micro_batches[0], tensors, first, stop)
            if stop < nodes and together and reducer:
                with self._lending.lend(stop, stop + 1, partial(reducer.use, dtype=torch.float64)):
                    together.norm_together(stop, [(micro[0], tensors) for _, micro, tensors in batches])
            first = stop + 1

    def _pieces(self, batch: _Batch) -> list[tuple[Piece, Sample]]:
        """Return the outputs of a batch that has run, piece by piece."""
        samples, micro_batches, tensors = batch
        outputs = zip(*(unbatched(tensors.pop(result)) for result in self.mode.network.graph.results), strict=True)
        pieces = (one.piece(*outputs_BKHW) for one, outputs_BKHW in zip(micro_batches, outputs, strict=True))
        return list(zip(pieces, samples, strict=True))

    def _take_part(self, mode: LayerMode) -> None:
        """Take part in the norms' backward sums on a rank without an image."""
        graph = mode.network.graph
        for k in reversed(self._norms):
            if graph.wants_gradient[graph.sources[k][0]]:  # else autograd sums nothing on the other ranks
                mode.no_gradients(k)

    def _work(self, batches: Sequence[_Batch]) -> doing:
        """Return the context that names the batches for the watch, by their first tile."""
        if len(batches) != 1:
            return doing("a step of %d batches", len(batches))
        samples, micro_batches, _ = batches[0]
        return doing("tile %d of image %d", micro_batches[0].tile.index, samples[0].image)


def _batch(loaded: Iterator[Loaded], size: int) -> _Batch:
    """Return the next micro-batches, of one shape, as a batch."""
    own = list(islice(loaded, size))
    inputs_BCHW = [x_BCHW for *_, x_BCHW in own if x_BCHW is not None]
    return [sample for sample, *_ in own], [micro_batch for _, micro_batch, _ in own], {0: batched(inputs_BCHW)}


def batched(inputs_BCHW: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate inputs of one shape, channels last; `unbatched` splits the network's outputs again."""
    if len(inputs_BCHW) == 1:
        return inputs_BCHW[0]
    return torch.cat(inputs_BCHW).contiguous(memory_format=torch.channels_last)


def unbatched(output_BKHW: torch.Tensor) -> Sequence[torch.Tensor]:
    return (output_BKHW,) if len(output_BKHW) == 1 else output_BKHW.split(1)


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
