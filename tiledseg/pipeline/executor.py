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

from tiledseg.comm.collectives import Message, Work
from tiledseg.comm.mesh import Axes
from tiledseg.memory.device import Stopwatch
from tiledseg.models.network import Tensors
from tiledseg.pipeline.chunk import Chunk, Held, StagedBatch
from tiledseg.pipeline.partition import SplitNetwork
from tiledseg.pipeline.schedule import ChunkPass, Route, StageMessage, compute_orders, forward_orders
from tiledseg.pipeline.simulation import Move, itinerary


class PipelineExecutor:
    """The executor of one rank's chunks. `train` and `outputs` are collective over the ranks of the pipeline, which
    pass the same number of micro-batches."""

    def __init__(self, split: SplitNetwork, axes: Axes) -> None:
        assert axes.position is not None, "a rank outside the mesh has no stage to run"
        self.stage = axes.position.stage
        cut = split.cut
        self.chunks = {
            index: Chunk(split.network, cut, index) for index, rank in enumerate(cut.ranks) if rank == self.stage
        }
        self.has_last = len(cut.runs) - 1 in self.chunks  # the chunk of the network's outputs
        self.busy = Stopwatch(split.device)
        self._split, self._axes, self._pipeline = split, axes, cut
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
                run.backward(move) if move.compute.backward else run.forward(move)
            run.send(move)
        run.finish()

    def outputs(self, micro_batches: Sequence[StagedBatch]) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
        """Yield each micro-batch's number and network outputs, in order, on the rank of the last chunk. Other ranks
        must exhaust the iterator, which yields nothing. Without gradients."""
        if not micro_batches:
            return
        moves = itinerary(forward_orders(self._pipeline, len(micro_batches)), self._pipeline, self.stage)
        run = _Run(self, micro_batches)
        for move in moves:
            run.receive(move)
            with self.busy.running():
                outputs = run.forward(move, differentiable=False)
            run.send(move)
            if self.chunks[move.compute.chunk].is_last:
                results = self._split.network.graph.results
                yield move.compute.micro_batch, tuple(outputs[result] for result in results)
        run.finish()

    def _plan(self, micro_batches: int) -> tuple[Move, ...]:
        settings = self._split.settings
        orders = compute_orders(settings.schedule, self._pipeline.size, micro_batches, settings.times)
        return itinerary(orders, self._pipeline, self.stage)

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
        self._pipeline, self._axes = executor._pipeline, executor._axes
        self._coming: dict[StageMessage, tuple[Work, torch.Tensor]] = {}
        self._leaving: dict[StageMessage, Work] = {}
        self._held: dict[ChunkPass, Held] = {}  # by the forward pass
        self._tensors: dict[StageMessage, torch.Tensor] = {}  # received, or made for this rank or to be sent

    def receive(self, move: Move) -> None:
        """Post receives, and wait for those that the move needs."""
        for message in move.posts:
            tensor = self._executor.buffer(message.route, self._micro_batches[message.micro_batch])
            self._coming[message] = self._axes.stage_messages.start([], [self._end(message.sender, tensor)]), tensor
        for message in move.needs:
            if message in self._coming:
                work, self._tensors[message] = self._coming.pop(message)
                work.wait()
        for message in move.released:
            self._leaving.pop(message).wait()

    def send(self, move: Move) -> None:
        for message in move.makes:
            if not self._pipeline.is_local(message.route):
                tensor = self._tensors.pop(message).contiguous(memory_format=torch.channels_last)
                self._leaving[message] = self._axes.stage_messages.start([self._end(message.receiver, tensor)], [])

    def _end(self, chunk: int, tensor_BCHW: torch.Tensor) -> Message:
        """Return a message from or to the rank of a chunk: a channels-last tensor, in the order of memory."""
        peer = self._axes.rank_of_stage(self._pipeline.ranks[chunk])
        return Message(peer, tensor_BCHW.detach().permute(0, 2, 3, 1))

    def forward(self, move: Move, differentiable: bool = True) -> Tensors:
        """Run a forward pass; return the outputs of the last chunk, else nothing. `differentiable`: a backward pass
        follows."""
        executor, m = self._executor, move.compute.micro_batch
        chunk = executor.chunks[move.compute.chunk]
        inputs = {message.route.tensor: self._tensors.pop(message) for message in move.needs}
        if chunk.is_first:
            inputs[0] = self._micro_batches[m].source()
        if differentiable:
            recompute = executor._split.settings.recomputes(executor.stage, m, len(self._micro_batches))
            self._held[move.compute], outputs = chunk.forward(self._micro_batches[m], inputs, recompute)
        else:
            outputs = chunk.outputs(self._micro_batches[m], inputs)
        for message in move.makes:
            self._tensors[message] = outputs[message.route.tensor]
        return outputs if chunk.is_last else {}

    def backward(self, move: Move) -> None:
        """Run a backward pass."""
        chunk = self._executor.chunks[move.compute.chunk]
        gradients: dict[int, list[torch.Tensor]] = {tensor: [] for tensor in chunk.leaving}
        for message in move.needs:
            gradients[message.route.tensor].insert(0, self._tensors.pop(message))
        held = self._held.pop(move.compute._replace(backward=False))
        sums = chunk.backward(self._micro_batches[move.compute.micro_batch], held, gradients)
        for message in move.makes:
            self._tensors[message] = sums[message.route.tensor]

    def finish(self) -> None:
        """Wait for the remaining sends."""
        for work in self._leaving.values():
            work.wait()
        left = [*self._coming, *self._held, *self._tensors]
        assert not left, f"the run has left {left[0]}"
