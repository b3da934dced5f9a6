"""Runs one rank's part of a pipeline over messages: one process a rank, tensors sent and received without waiting.

A rank follows its itinerary: it posts receives ahead, waits for what the next computation needs, computes, and sends
on. See `itinerary` for why nothing can deadlock and when a sent tensor is let go, and `chunk` for what is computed.

The law: loss, gradients and buffers are those of the micro-batches run one after the other through the whole network,
for every schedule, balance and recompute mode. Norms that take statistics take those of one micro-batch, and running
statistics move micro-batch by micro-batch in their order, since every schedule goes forward in that order.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from tiledseg.comm.axes import Axes
from tiledseg.comm.transports.point_to_point import Message
from tiledseg.comm.transports.stopwatch import Stopwatch
from tiledseg.comm.transports.work import Work
from tiledseg.models.network import Tensors
from tiledseg.pipeline.chunk import Chunk, Held, StagedBatch
from tiledseg.pipeline.itinerary import Move, itinerary
from tiledseg.pipeline.partition import SplitNetwork
from tiledseg.pipeline.schedule import (
    Forward,
    Receive,
    ReceiveActivation,
    Route,
    Send,
    SendActivation,
    forward_program,
    most_in_flight,
    program,
)
from tiledseg.pipeline.simulation import verify

_VERIFIED = 256  # micro-batches: beyond them a schedule only repeats itself


class PipelineExecutor:
    """One rank's chunks, run with those of the other stages of its pipeline.

    Every method that runs something is collective over the ranks of the pipeline, which pass the same number of
    micro-batches.
    """

    def __init__(self, split: SplitNetwork, axes: Axes) -> None:
        assert axes.position is not None, "a rank outside the mesh has no stage to run"
        self.stage = axes.position.stage
        cut = split.cut
        self.chunks = {
            index: Chunk(split.network, cut, index)
            for index, rank in enumerate(cut.pipeline.ranks)
            if rank == self.stage
        }
        self.busy = Stopwatch(split.device)
        self.most_held: dict[int, int] = {}  # micro-batches of each chunk at once, in the last step
        self._split, self._axes, self._pipeline = split, axes, cut.pipeline
        self._in_order = axes.stage_messages.in_order
        self._moves = functools.lru_cache(maxsize=8)(self._plan)

    @property
    def has_first(self) -> bool:
        """True if this rank takes the network's input."""
        return 0 in self.chunks

    @property
    def has_last(self) -> bool:
        """True if this rank makes the network's output."""
        return len(self._pipeline.ranks) - 1 in self.chunks

    def train(
        self, micro_batches: Sequence[StagedBatch], last_backward: Callable[[Iterable[nn.Parameter]], None]
    ) -> None:
        """Run forward and backward passes of all micro-batches; gradients are added to those of the weights.

        `last_backward` is called before the last backward pass of each chunk, with its parameters: after it, their
        gradients are whole.
        """
        if not micro_batches:
            return
        self.most_held = {}
        moves = self._moves(len(micro_batches))
        last = {move.compute.chunk: move.compute for move in moves if not isinstance(move.compute, Forward)}
        run = _Run(self, micro_batches)
        for move in moves:
            if last.get(move.compute.chunk) == move.compute:
                last_backward(self.chunks[move.compute.chunk].parameters())
            run.do(move)
        run.finish()

    def outputs(self, micro_batches: Sequence[StagedBatch]) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
        """Yield the network's outputs of each micro-batch with its number, in order, on the rank of the last chunk;
        nothing on the others, which have to run through it all the same. Without gradients."""
        if not micro_batches:
            return
        moves = itinerary(forward_program(self._pipeline, len(micro_batches)), self.stage, self._in_order)
        run = _Run(self, micro_batches)
        for move in moves:
            outputs = run.pass_on(move)
            if outputs is not None:
                yield move.compute.micro_batch, outputs
        run.finish()

    def _plan(self, micro_batches: int) -> tuple[Move, ...]:
        """Return the moves for so many micro-batches, whose schedule has been simulated without a fault."""
        pipeline, schedule, times = self._pipeline, self._split.settings.schedule, self._split.settings.times
        sample = min(micro_batches, _VERIFIED)
        bounds = most_in_flight(schedule, pipeline.size, sample)
        verify(program(schedule, pipeline, sample, times), len(pipeline.ranks), bounds)
        return itinerary(program(schedule, pipeline, micro_batches, times), self.stage, self._in_order)

    def buffer(self, route: Route, micro_batch: StagedBatch) -> torch.Tensor:
        """Return room for what travels along a route, either way: channels last, in one piece."""
        return torch.empty(
            (micro_batch.images, *micro_batch.shapes[route.tensor]),
            dtype=self._split.dtypes[route.tensor],
            device=self._split.device,
            memory_format=torch.channels_last,
        )


class _Run:
    """The micro-batches of one run, and what is under way of them."""

    def __init__(self, executor: PipelineExecutor, micro_batches: Sequence[StagedBatch]) -> None:
        self._executor = executor
        self._micro_batches = micro_batches
        self._routes = executor._pipeline.routes
        self._coming: dict[Receive, tuple[Work, torch.Tensor]] = {}
        self._leaving: dict[Send, Work] = {}
        self._held: dict[tuple[int, int], Held] = {}
        self._holding: Counter[int] = Counter()
        # What has come for a computation, or is handed on by this rank itself.
        self._activations: dict[tuple[int, Route], torch.Tensor] = {}
        self._gradients: dict[tuple[int, Route], torch.Tensor] = {}

    def do(self, move: Move) -> None:
        """Do one move of a training step."""
        self._receive(move)
        m, chunk = move.compute.micro_batch, self._executor.chunks[move.compute.chunk]
        with self._executor.busy.running():
            if isinstance(move.compute, Forward):
                self._forward(m, chunk)
            else:
                self._backward(m, chunk)
        self._send(move.sends)

    def pass_on(self, move: Move) -> tuple[torch.Tensor, ...] | None:
        """Do one move of a run that only goes forward; return the network's outputs from the last chunk."""
        self._receive(move)
        m, chunk = move.compute.micro_batch, self._executor.chunks[move.compute.chunk]
        with self._executor.busy.running():
            outputs = chunk.output(self._micro_batches[m], self._inputs(m, chunk))
        if chunk.is_last:
            return tuple(outputs[result] for result in self._executor._split.network.graph.results)
        self._hand_on(m, chunk, outputs)
        self._send(move.sends)
        return None

    def finish(self) -> None:
        for work in self._leaving.values():
            work.wait()
        self._leaving.clear()
        left = [*self._coming, *self._held, *self._activations, *self._gradients]
        assert not left, f"the run has left {left[0]}"

    def _receive(self, move: Move) -> None:
        messages = self._executor._axes.stage_messages
        for receive in move.posts:
            tensor = self._executor.buffer(receive.route, self._micro_batches[receive.micro_batch])
            peer = self._executor._axes.rank_of_stage(receive.peer)
            self._coming[receive] = messages.start([], [Message(peer, _flat(tensor))]), tensor
        for receive in move.receives:
            work, tensor = self._coming.pop(receive)
            work.wait()
            place = self._activations if isinstance(receive, ReceiveActivation) else self._gradients
            place[receive.micro_batch, receive.route] = tensor
        for send in move.released:
            self._leaving.pop(send).wait()

    def _send(self, sends: Sequence[Send]) -> None:
        for send in sends:
            place = self._activations if isinstance(send, SendActivation) else self._gradients
            tensor = place.pop((send.micro_batch, send.route)).contiguous(memory_format=torch.channels_last)
            peer = self._executor._axes.rank_of_stage(send.peer)
            self._leaving[send] = self._executor._axes.stage_messages.start([Message(peer, _flat(tensor))], [])

    def _forward(self, m: int, chunk: Chunk) -> None:
        executor = self._executor
        recompute = executor._split.settings.recomputes(executor.stage, m, len(self._micro_batches))
        held, outputs = chunk.forward(self._micro_batches[m], self._inputs(m, chunk), recompute)
        self._held[m, chunk.index] = held
        self._holding[chunk.index] += 1
        most = executor.most_held
        most[chunk.index] = max(most.get(chunk.index, 0), self._holding[chunk.index])
        if not chunk.is_last:
            self._hand_on(m, chunk, outputs)

    def _backward(self, m: int, chunk: Chunk) -> None:
        gradients: dict[int, list[torch.Tensor]] = {tensor: [] for tensor in chunk.leaving}
        for route in self._routes:
            if route.source == chunk.index and route.returns:
                gradients[route.tensor].insert(0, self._gradients.pop((m, route)))
        found = chunk.backward(self._micro_batches[m], self._held.pop((m, chunk.index)), gradients)
        self._holding[chunk.index] -= 1
        for route in self._routes:
            if route.target == chunk.index and route.returns:
                self._gradients[m, route] = found[route.tensor]

    def _inputs(self, m: int, chunk: Chunk) -> Tensors:
        """Return what has come for a chunk; the network's input for the first."""
        inputs = {r.tensor: self._activations.pop((m, r)) for r in self._routes if r.target == chunk.index}
        return inputs if not chunk.is_first else {**inputs, 0: self._micro_batches[m].source()}

    def _hand_on(self, m: int, chunk: Chunk, outputs: Tensors) -> None:
        for route in self._routes:
            if route.source == chunk.index:
                self._activations[m, route] = outputs[route.tensor]


def _flat(tensor_BCHW: torch.Tensor) -> torch.Tensor:
    """Return the values of a channels-last tensor in one piece, as they lie in memory."""
    return tensor_BCHW.detach().permute(0, 2, 3, 1)
