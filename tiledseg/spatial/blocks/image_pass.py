"""This rank's blocks of one image: what is done with each of them, and what lies between segments. `block_pass` says
when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from tiledseg.comm.axes import Axes
from tiledseg.geometry.box import Box
from tiledseg.geometry.sharing.segments import Segment
from tiledseg.models.network import Tensors
from tiledseg.spatial.blocks.messages import BlockMessages
from tiledseg.spatial.blocks.network import BlockNetwork
from tiledseg.spatial.blocks.program import BlockProgram, BlockRun
from tiledseg.spatial.blocks.statistics import Cast, ImageStatistics
from tiledseg.spatial.blocks.store import INPUT, BlockGradients, BlockValues, Bring, Shelf
from tiledseg.spatial.blocks.sums import Doing

Outputs = tuple[torch.Tensor, ...]
LossOf = Callable[[int, Outputs], torch.Tensor | None]


def _nothing() -> None:
    pass


class Image(NamedTuple):
    """What goes through a network: `x_BCHW`, this rank's part of its input, cut as `program` says. `begin` is called
    before any of its blocks is computed, after one of another image."""

    x_BCHW: torch.Tensor
    program: BlockProgram
    begin: Callable[[], None] = _nothing


class PassOptions(NamedTuple):
    """Where blocks lie in between; whose gradients are wanted, by the tensor; in which precision layers compute, their
    backward passes as these do; what makes a window of the input one on the network's device, in its layout, None
    where it is already; the ranks that share an image."""

    shelf: Shelf
    wants: Sequence[bool]
    cast: Cast
    bring: Bring | None
    axes: Axes


class ImagePass:
    """`compute` and `differentiate` are given a segment, by its index, and a block: no communication. `complete` and
    `complete_gradients`, of a tensor, are collective over the ranks of the image."""

    def __init__(self, network: BlockNetwork, image: Image, how: PassOptions, joins: bool) -> None:
        self._network, self.program, self._how, self._begin = network, image.program, how, image.begin
        self._values, self._gradients = BlockValues(self.program, how.shelf), BlockGradients(self.program, how.shelf)
        self._messages = BlockMessages(self.program, how.axes, self._values, self._gradients)
        self.statistics = ImageStatistics(network, self.program, how.axes.image, how.cast, joins)
        self._blocks = max(self.program.blocks, 2 if joins else 1)  # one that is all of its image still adds to sums
        self._values.put_input(image.x_BCHW, how.bring)

    def begin(self) -> None:
        """A block of this image comes next, maybe after one of another."""
        turn = self._network.turn
        if turn.sums is not self.statistics.sums:
            turn.blocks, turn.sums = self._blocks, self.statistics.sums
            self._begin()

    def measure_input(self) -> None:
        """What layers take of the input itself."""
        self.begin()
        for block in self.program.own if self.statistics.wanted(INPUT) else ():
            self.statistics.add(INPUT, block, self._values.own_input(block))

    def compute(self, index: int, block: int) -> None:
        """A segment that is not the last."""
        (tensor,) = self.program.segments[index].leaving
        y_BCHW = self._run(index, block, self._windows(index, block))[tensor]
        self.statistics.add(tensor, block, y_BCHW)
        self._values.put(tensor, block, y_BCHW)

    def outputs(self, block: int) -> Outputs:
        """The network's outputs on a block, each its part of `output_box`. Without gradients, or any communication."""
        self.begin()
        with torch.no_grad():
            last = len(self.program.segments) - 1
            tensors = self._run(last, block, self._windows(last, block))
        return tuple(tensors[tensor] for tensor in self._network.graph.results)

    def output_box(self, block: int) -> Box:
        """A block of the first output, in positions of the whole output."""
        return self._network.output_box(self.program, block)

    def input_gradient(self, block: int) -> torch.Tensor | None:
        """That of a block of the input, after the backward pass; once."""
        self.begin()
        x_BCHW = self._values.own_input(block)
        return self.statistics.with_gradient(INPUT, block, x_BCHW, self._gradients.take(INPUT, block))

    def complete(self, tensor: int) -> None:
        """This rank has all its blocks of a tensor: what others read of them goes there, and theirs comes."""
        self._messages.values(tensor)
        self.statistics.complete(tensor)

    def complete_gradients(self, tensor: int) -> None:
        """All that this rank adds to a tensor's gradient has been added."""
        self._messages.gradients(tensor)
        self.statistics.complete_gradients(tensor)

    def drop(self, tensor: int) -> None:
        """Nobody reads a tensor any more."""
        self._values.drop(tensor)

    def close(self) -> None:
        """Lets go of all blocks."""
        self._values.clear()
        self._gradients.clear()

    def ahead(self, index: int, block: int, backward: bool) -> None:
        """What the block reads begins to come."""
        segment = self.program.segments[index]
        for tensor, window in self.program.runs[index][block].windows.items():
            self._values.ahead(tensor, block, window)
        for tensor in (*segment.leaving, *segment.entering) if backward else ():
            self._gradients.ahead(tensor, block)

    def _windows(self, index: int, block: int) -> Tensors:
        windows = self.program.runs[index][block].windows
        return {tensor: self._values.read(tensor, block, window) for tensor, window in windows.items()}

    def _run(self, index: int, block: int, tensors: Tensors) -> Tensors:
        """What leaves a segment, of what enters it. Running statistics move the first time."""
        segment, run = self.program.segments[index], self.program.runs[index][block]
        self._network.turn.block, self._network.turn.doing = block, Doing.COMPUTE
        for tensor in self._network.written_over(segment):
            tensors[tensor] = tensors[tensor].clone()
        with self._how.cast(), self.statistics.still(segment.nodes):
            for k, action in zip(segment.nodes, run.actions, strict=True):
                layer = self._network.layers[k]
                given = zip(action.inputs, self._network.graph.sources[k], strict=True)
                windows = [bring.padded(bring.cut(tensors[source]), layer.fill) for bring, source in given]
                tensors[k + 1] = self.statistics.compute(k, action.place, windows)
                del windows
                for tensor in self._released(segment.nodes, segment.leaving, k):
                    del tensors[tensor]
        return {tensor: self._own(segment, run, tensor, tensors[tensor]) for tensor in segment.leaving}

    def _own(self, segment: Segment, run: BlockRun, tensor: int, made_BCHW: torch.Tensor) -> torch.Tensor:
        """A block of what leaves: nodes may have made more, for each other."""
        inside = tensor - 1 in segment.nodes
        given = run.actions[segment.nodes.index(tensor - 1)].given if inside else run.windows[tensor].box
        own = self.program.leaving_box(segment, tensor, self._network.turn.block)
        return made_BCHW if own == given else made_BCHW[(slice(None), slice(None), *own.relative_to(given).slices)]

    def _released(self, nodes: Sequence[int], leaving: Sequence[int], k: int) -> Iterator[int]:
        """The tensors that no later node of a segment takes."""
        later = {source for node in nodes if node > k for source in self._network.graph.sources[node]}
        yield from (t for t in {k + 1, *self._network.graph.sources[k]} if t not in later and t not in leaving)

    def differentiate(self, index: int, block: int, loss: LossOf | None = None) -> None:
        """A segment once more, and back; the last by its `loss`."""
        segment, run = self.program.segments[index], self.program.runs[index][block]
        gradient = None if loss is not None else self._gradients.take(segment.leaving[0], block)
        windows = self._windows(index, block)
        with torch.enable_grad():
            for tensor, x_BCHW in windows.items():
                windows[tensor] = x_BCHW.detach().requires_grad_(self._how.wants[tensor])
            made = self._run(index, block, dict(windows))
            self._network.turn.doing = Doing.DIFFERENTIATE
            if loss is not None:
                self._start(block, tuple(made[tensor] for tensor in self._network.graph.results), loss)
            else:
                self._pull(segment.leaving[0], block, made.pop(segment.leaving[0]), gradient)
        for tensor, leaf in windows.items():
            if leaf.grad is not None:
                self._gradients.add(tensor, block, run.windows[tensor], leaf.grad)
                leaf.grad = None

    def _start(self, block: int, outputs: Outputs, loss: LossOf) -> None:
        """The backward pass of the loss. Blocks that it does not look at add zeros to what ranks sum."""
        scalar = loss(block, outputs)
        if scalar is not None and scalar.requires_grad:
            scalar.backward()
        elif self.program.ranks.size > 1:
            made = [output_BKHW for output_BKHW in outputs if output_BKHW.requires_grad]
            torch.autograd.backward(made, [torch.zeros_like(output_BKHW) for output_BKHW in made])

    def _pull(self, tensor: int, block: int, y_BCHW: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """The backward pass of a block of a stored tensor, which statistics may have been taken of."""
        if not y_BCHW.requires_grad:
            return
        gradient = self.statistics.with_gradient(tensor, block, y_BCHW.detach(), gradient)
        if gradient is None and self.program.ranks.size > 1:
            gradient = torch.zeros_like(y_BCHW)
        if gradient is not None:
            self._network.turn.doing = Doing.DIFFERENTIATE
            y_BCHW.backward(gradient)
