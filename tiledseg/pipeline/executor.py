"""The executor of one rank's part of a pipeline: one process a rank, with asynchronous messages.

A rank follows its itinerary: it posts receives ahead, waits for the inputs of the next computation, computes, and
sends. `simulation` says why nothing can deadlock and when a sent tensor is freed; `chunk` computes.

The law: loss, gradients and buffers are those of the micro-batches run one after the other through the whole network,
for every schedule, balance and recompute mode. Norms take the statistics of one micro-batch, and update the running
ones in the order of micro-batches, which is that of every schedule's forward passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from tiledseg.comm.mesh import Axes
from tiledseg.comm.point_to_point import Message, Work
from tiledseg.memory.device import Stopwatch
from tiledseg.models.network import Tensors
from tiledseg.pipeline.chunk import Chunk, Held, StagedBatch
from tiledseg.pipeline.partition import SplitNetwork
from tiledseg.pipeline.schedule import MessageEnd, Route, forward_program, program
from tiledseg.pipeline.simulation import Move, itinerary


class PipelineExecutor:
    """The executor of one rank's chunks. `train` and `outputs` are collective over the ranks of the pipeline, which
    pass the same number of micro-batches."""

    def __init__(self, split: SplitNetwork, axes: Axes) -> None:
        assert axes.position is not None, "a rank outside the mesh has no stage to run"
        self.stage = axes.position.stage
        cut = split.cut
        self.chunks = {
            index: Chunk(split.network, cut, index)
            for index, rank in enumerate(cut.pipeline.ranks)
            if rank == self.stage
        }
        self.has_last = len(cut.runs) - 1 in self.chunks  # the chunk of the network's outputs
        self.busy = Stopwatch(split.device)
        self._split, self._axes, self._pipeline = split, axes, cut.pipeline
        self._moves = functools.lru_cache(maxsize=8)(self._plan)

    def train(
        self, micro_batches: Sequence[StagedBatch], last_backward: Callable[[Iterable[nn.Parameter]], None]
    ) -> None:
        """Run the forward and backward passes of all micro-batches, and add to the gradients of the weights.

        `last_backward` is called with a chunk's parameters before the pass that completes their gradients.
        """
        if not micro_batches:
            return
        moves = self._moves(len(micro_batches))
        last = {move.compute.chunk: move.compute for move in moves if move.compute.backward}
        run = _Run(self, micro_batches)
        for move in moves:
            if last.get(move.compute.chunk) == move.compute:
                last_backward(self.chunks[move.compute.chunk].parameters())
            run.receive(move)
            with self.busy.running():
                run.backward(*move.compute[:2]) if move.compute.backward else run.forward(*move.compute[:2])
            run.send(move.sends)
        run.finish()

    def outputs(self, micro_batches: Sequence[StagedBatch]) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
        """Yield each micro-batch's number and network outputs, in order, on the rank of the last chunk. Other ranks
        must exhaust the iterator, which yields nothing. Without gradients."""
        if not micro_batches:
            return
        moves = itinerary(forward_program(self._pipeline, len(micro_batches)), self.stage)
        run = _Run(self, micro_batches)
        for move in moves:
            run.receive(move)
            with self.busy.running():
                outputs = run.forward(*move.compute[:2], differentiable=False)
            run.send(move.sends)
            if self.chunks[move.compute.chunk].is_last:
                results = self._split.network.graph.results
                yield move.compute.micro_batch, tuple(outputs[result] for result in results)
        run.finish()

    def _plan(self, micro_batches: int) -> tuple[Move, ...]:
        settings = self._split.settings
        return itinerary(program(settings.schedule, self._pipeline, micro_batches, settings.times), self.stage)

    def buffer(self, route: Route, micro_batch: StagedBatch) -> torch.Tensor:
        """Return an uninitialised tensor for a message along a route, in either direction: channels last,
        contiguous."""
        return torch.empty(
            (micro_batch.images, *micro_batch.shapes[route.tensor]),
            dtype=self._split.dtypes[route.tensor],
            device=self._split.device,
            memory_format=torch.channels_last,
        )


class _Run:
    """The state of one run: its micro-batches, messages in flight, and tensors between computations."""

    def __init__(self, executor: PipelineExecutor, micro_batches: Sequence[StagedBatch]) -> None:
        self._executor, self._micro_batches = executor, micro_batches
        self._routes, self._axes = executor._pipeline.routes, executor._axes
        self._coming: dict[MessageEnd, tuple[Work, torch.Tensor]] = {}
        self._leaving: dict[MessageEnd, Work] = {}
        self._held: dict[tuple[int, int], Held] = {}
        # Tensors received for a computation, or made by this rank for itself, by (gradient, micro-batch, route).
        self._tensors: dict[tuple[bool, int, Route], torch.Tensor] = {}

    def receive(self, move: Move) -> None:
        """Post receives, and wait for those that the move needs."""
        for end in move.posts:
            tensor = self._executor.buffer(end.route, self._micro_batches[end.micro_batch])
            message = Message(self._axes.rank_of_stage(end.peer), _flat(tensor))
            self._coming[end] = self._axes.stage_messages.start([], [message]), tensor
        for end in move.receives:
            work, tensor = self._coming.pop(end)
            work.wait()
            self._tensors[end.gradient, end.micro_batch, end.route] = tensor
        for end in move.released:
            self._leaving.pop(end).wait()

    def send(self, ends: Sequence[MessageEnd]) -> None:
        for end in ends:
            tensor = self._tensors.pop((end.gradient, end.micro_batch, end.route))
            tensor = tensor.contiguous(memory_format=torch.channels_last)
            message = Message(self._axes.rank_of_stage(end.peer), _flat(tensor))
            self._leaving[end] = self._axes.stage_messages.start([message], [])

    def forward(self, m: int, index: int, differentiable: bool = True) -> Tensors:
        """Run chunk `index` forward for micro-batch `m`; return the outputs of the last chunk, else nothing.
        `differentiable`: a backward pass follows."""
        executor = self._executor
        chunk = executor.chunks[index]
        inputs = {r.tensor: self._tensors.pop((False, m, r)) for r in self._routes if r.target == index}
        if chunk.is_first:
            inputs[0] = self._micro_batches[m].source()
        if differentiable:
            recompute = executor._split.settings.recomputes(executor.stage, m, len(self._micro_batches))
            self._held[m, index], outputs = chunk.forward(self._micro_batches[m], inputs, recompute)
        else:
            outputs = chunk.outputs(self._micro_batches[m], inputs)
        for route in self._routes:
            if route.source == index:
                self._tensors[False, m, route] = outputs[route.tensor]
        return outputs if chunk.is_last else {}

    def backward(self, m: int, index: int) -> None:
        """Run chunk `index` backward for micro-batch `m`."""
        chunk = self._executor.chunks[index]
        gradients: dict[int, list[torch.Tensor]] = {tensor: [] for tensor in chunk.leaving}
        for route in self._routes:
            if route.source == index and route.returns:
                gradients[route.tensor].insert(0, self._tensors.pop((True, m, route)))
        sums = chunk.backward(self._micro_batches[m], self._held.pop((m, index)), gradients)
        for route in self._routes:
            if route.target == index and route.returns:
                self._tensors[True, m, route] = sums[route.tensor]

    def finish(self) -> None:
        """Wait for the remaining sends."""
        for work in self._leaving.values():
            work.wait()
        left = [*self._coming, *self._held, *self._tensors]
        assert not left, f"the run has left {left[0]}"


def _flat(tensor_BCHW: torch.Tensor) -> torch.Tensor:
    """Return a channels-last tensor as a contiguous one, in the order of memory."""
    return tensor_BCHW.detach().permute(0, 2, 3, 1)
