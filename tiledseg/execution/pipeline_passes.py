"""Passes in a pipeline: this rank runs its stage for all micro-batches.

The rank of the first chunk loads pixels, that of the last chunk labels; the others load nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from tiledseg.comm.point_to_point import PointToPoint
from tiledseg.execution.halo_modes import MicroBatch, Part, Piece, ReadMode
from tiledseg.execution.part_passes import Key, Loaded, Loss, Passes
from tiledseg.gradients import GradientReducer
from tiledseg.memory.device import Stopwatch
from tiledseg.models.dropout import set_dropout_key
from tiledseg.models.network import Tensors
from tiledseg.pipeline.executor import PipelineExecutor
from tiledseg.raster.samples.dataset import Sample

_FORWARD_ROUND = 256  # micro-batches without gradients between two flushes: bounds the itinerary of a large map


class PipelinePasses(Passes):
    """One rank's part of a pipeline's passes. `executor`: None on a rank outside the mesh, which does nothing.

    The times of passes and of computing are both measured on `device`, so their difference, the waiting, is never
    negative. `round_size`: micro-batches between two flushes of the pipeline in training (None: all of a step).
    """

    def __init__(
        self,
        mode: ReadMode,
        executor: PipelineExecutor | None,
        messages: PointToPoint,
        round_size: int | None,
        device: torch.device,
    ) -> None:
        self.mode = mode
        self._executor = executor
        self._messages = messages
        self._round_size = round_size
        self._passes = Stopwatch(device)
        self.loads_pixels = executor is not None and 0 in executor.chunks
        self.loads = self.loads_pixels or (executor is not None and executor.has_last)

    def train(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key, loss: Loss, reducer: GradientReducer
    ) -> None:
        self._messages.reset()
        self._passes.reset()
        with self._passes.running():
            if self._executor is not None:
                self._executor.busy.reset()
                if self.rounds(parts, loss.looks_first) > 1:  # alike on all ranks of a pipeline, which share the parts
                    self._look(self.outputs(samples, parts, key), loss)
                feed = _Feed(self._loaded(samples))
                numbered = list(enumerate(self._micro_batches(parts)))
                size = self._round_size or max(1, len(numbered))
                for first in range(0, len(numbered), size):
                    last_round = first + size >= len(numbered)
                    batch = [_Staged(self.mode, one, n, feed, key, loss) for n, one in numbered[first : first + size]]
                    # Gradients are complete only in the last round.
                    self._executor.train(batch, reducer.overlap if last_round else lambda parameters: None)

    def rounds(self, parts: Sequence[Part], looks_first: bool) -> int:
        return 2 if looks_first and parts else 1

    def outputs(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key | None = None
    ) -> Iterator[tuple[Piece, Sample]]:
        if self._executor is None:
            return
        feed = _Feed(self._loaded(samples))
        numbered = enumerate(self._micro_batches(parts))
        while batch := list(islice(numbered, _FORWARD_ROUND)):
            staged = [_Staged(self.mode, one, number, feed, key) for number, one in batch]
            for number, outputs_BKHW in self._executor.outputs(staged):
                done = staged[number]
                yield done.micro_batch.piece(*outputs_BKHW), done.sample

    def pieces(self, parts: Sequence[Part]) -> int:
        return super().pieces(parts) if self._executor is not None and self._executor.has_last else 0

    def figures(self) -> tuple[float, float, int, int]:
        busy = 0.0 if self._executor is None else self._executor.busy.seconds()
        return busy, self._passes.seconds(), self._messages.bytes, self._messages.messages


class _Feed:
    """Loaded micro-batches by number, each taken once."""

    def __init__(self, loaded: Iterator[Loaded]) -> None:
        self._entries = enumerate(loaded)
        self._waiting: dict[int, Loaded] = {}

    def take(self, number: int) -> Loaded:
        """Return micro-batch `number`; earlier ones are kept until they are taken."""
        while number not in self._waiting:
            self._waiting.update([next(self._entries)])
        return self._waiting.pop(number)


class _Staged:
    """A `pipeline.chunk.StagedBatch`. Without `key` and `loss` it only runs forward."""

    images = 1

    def __init__(
        self,
        mode: ReadMode,
        micro_batch: MicroBatch,
        number: int,
        feed: _Feed,
        key: Key | None = None,
        loss: Loss | None = None,
    ) -> None:
        self.micro_batch = micro_batch
        self.shapes = mode.shapes(micro_batch)
        self._mode, self._number, self._feed = mode, number, feed
        self._key, self._loss = key, loss
        self._sample: Sample | None = None

    @property
    def sample(self) -> Sample:
        """The micro-batch's sample, on a rank that loads."""
        if self._sample is None:
            self._sample = self._feed.take(self._number)[0]
        return self._sample

    def source(self) -> torch.Tensor:
        self._sample, _, x_BCHW = self._feed.take(self._number)
        assert x_BCHW is not None, "only the rank of the first chunk asks for the input"
        return x_BCHW

    def run_nodes(self, tensors: Tensors, first: int, stop: int) -> None:
        if self._key is not None:
            set_dropout_key(self._mode.network, self._key(self.micro_batch.image))
        self._mode.run_nodes(self.micro_batch, tensors, first, stop)

    def loss(self, *outputs_BKHW: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None, "a pass without gradients takes no loss"
        result = self._loss([(self.micro_batch.piece(*outputs_BKHW), self.sample)])
        self._sample = None  # its labels are not needed again
        return result
