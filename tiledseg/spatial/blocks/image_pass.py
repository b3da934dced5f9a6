"""One image on its way through a network in blocks, which are computed one after the other, segment by segment.

The law: outputs, gradients and buffers are those of the network on the whole image, norms over the image included.
Nothing travels within a segment, whose halo is read with the window, and only what leaves a segment is kept, in blocks,
outside of autograd. The backward pass runs each segment once more, block by block, last segment first, and adds up the
gradients of what it read.

    store    input    conv0's output     conv1's output           forward: ->   backward: <-
    block 0    | conv0 |   | norm0 act0 conv1 |   | norm1 ...     what stands between bars is a segment: for each block
    block 1    | conv0 |   | norm0 act0 conv1 |   | norm1 ...     it reads a window, and gives a block

Between segments ranks that share the image bring each other what their blocks read (`messages`), and add up statistics
(`statistics`); between blocks they do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch

from tiledseg.comm.axes import Axes, serial_axes
from tiledseg.geometry.box import Box
from tiledseg.geometry.sharing.segments import Segment
from tiledseg.memory.disk.shelf import MemoryShelf
from tiledseg.models.network import Tensors
from tiledseg.spatial.blocks.messages import BlockMessages
from tiledseg.spatial.blocks.network import BlockNetwork
from tiledseg.spatial.blocks.program import BlockProgram, BlockRun
from tiledseg.spatial.blocks.statistics import Cast, ImageStatistics
from tiledseg.spatial.blocks.store import INPUT, BlockGradients, BlockValues, Bring, Shelf
from tiledseg.spatial.blocks.sums import Doing

Outputs = tuple[torch.Tensor, ...]
LossOf = Callable[[int, Outputs], torch.Tensor | None]


class BlockPass:
    """This rank's blocks of one image: `forward`, then `backward`, or `outputs` as often as one likes.

    `x_BCHW`: what the rank owns of the input. `shelf`: where blocks lie in between. `axes`: the ranks that share the
    image; `forward`, `backward` and the making are collective over them. `input_gradient`: that of the input is wanted
    too, block by block in the end. `cast`: in which precision layers compute, their backward passes as these do.
    `bring`: what makes a window of the input one on the network's device, in its layout; none where it is already.
    `close` lets go of all that is kept.
    """

    def __init__(
        self,
        network: BlockNetwork,
        x_BCHW: torch.Tensor,
        program: BlockProgram,
        shelf: Shelf | None = None,
        input_gradient: bool = False,
        cast: Cast = nullcontext,
        bring: Bring | None = None,
        axes: Axes | None = None,
    ) -> None:
        axes = axes or serial_axes()
        self._shelf = shelf = shelf or MemoryShelf()
        self._network, self.program, self._cast = network, program, cast
        self._values, self._gradients = BlockValues(program, shelf), BlockGradients(program, shelf)
        self._messages = BlockMessages(program, axes, self._values, self._gradients)
        self._statistics = ImageStatistics(network, program, axes.image, cast)
        self._wants = network.wants_gradient(input_gradient)
        self._values.put_input(x_BCHW, bring)
        for block in program.own if self._statistics.wanted(INPUT) else ():
            self._statistics.add(INPUT, block, self._values.own_input(block))
        self._complete(INPUT)

    def forward(self, keep: bool = True) -> None:
        """All segments but the last, without gradients. `keep`: for a backward pass."""
        *inner, _ = self.program.segments
        with torch.no_grad():
            for index, segment in enumerate(inner):
                (tensor,) = segment.leaving
                for block in self._blocks(index):
                    y_BCHW = self._run(index, block, self._windows(index, block))[tensor]
                    self._statistics.add(tensor, block, y_BCHW)
                    self._values.put(tensor, block, y_BCHW)
                self._complete(tensor)
                for done in [] if keep else self._last_taken(index):
                    self._values.drop(done)

    def outputs(self, block: int) -> Outputs:
        """The network's outputs on a block, each its part of `output_box`. Without gradients, or any communication."""
        with torch.no_grad():
            last = len(self.program.segments) - 1
            tensors = self._run(last, block, self._windows(last, block))
        return tuple(tensors[tensor] for tensor in self._network.graph.results)

    def output_box(self, block: int) -> Box:
        """A block of the first output, in positions of the whole output."""
        return self._network.output_box(self.program, block)

    def backward(self, loss: LossOf) -> None:
        """Differentiates the sum over all blocks of `loss`, which is given a block and the outputs on it; None: it does
        not look at them. Gradients of weights are added block by block."""
        last = len(self.program.segments) - 1
        for block in self._blocks(last, True):
            self._differentiate(last, block, loss)
        for index in reversed(range(last)):
            (tensor,) = self.program.segments[index].leaving
            self._values.drop(tensor)
            self._complete_gradients(tensor)
            for block in self._blocks(index, True):
                self._differentiate(index, block)
        self._complete_gradients(INPUT)

    def input_gradient(self, block: int) -> torch.Tensor | None:
        """That of a block of the input, after `backward`; once."""
        x_BCHW = self._values.own_input(block)
        return self._statistics.with_gradient(INPUT, block, x_BCHW, self._gradients.take(INPUT, block))

    def close(self) -> None:
        """Lets go of all blocks."""
        self._values.clear()
        self._gradients.clear()

    def _complete(self, tensor: int) -> None:
        """This rank has all its blocks of a tensor: what others read of them goes there, and theirs comes."""
        self._messages.values(tensor)
        self._statistics.complete(tensor)
        self._shelf.rest()

    def _complete_gradients(self, tensor: int) -> None:
        """All that this rank adds to a tensor's gradient has been added."""
        if self._wants[tensor]:
            self._messages.gradients(tensor)
            self._statistics.complete_gradients(tensor)
            self._shelf.rest()

    def _blocks(self, index: int, backward: bool = False) -> Iterator[int]:
        """This rank's blocks, in their order; at each, what the next one reads begins to come."""
        own = self.program.own
        for block, following in zip(own, (*own[1:], None), strict=True):
            if following is not None:
                self._ahead(index, following, backward)
            yield block

    def _ahead(self, index: int, block: int, backward: bool) -> None:
        segment = self.program.segments[index]
        for tensor, window in self.program.runs[index][block].windows.items():
            self._values.ahead(tensor, block, window)
        for tensor in (*segment.leaving, *segment.entering) if backward else ():
            self._gradients.ahead(tensor, block)

    def _last_taken(self, index: int) -> list[int]:
        """The tensors that no segment after this one takes."""
        later = {tensor for segment in self.program.segments[index + 1 :] for tensor in segment.entering}
        return [tensor for tensor in self.program.segments[index].entering if tensor not in later]

    def _windows(self, index: int, block: int) -> Tensors:
        windows = self.program.runs[index][block].windows
        return {tensor: self._values.read(tensor, block, window) for tensor, window in windows.items()}

    def _run(self, index: int, block: int, tensors: Tensors) -> Tensors:
        """What leaves a segment, of what enters it. Running statistics move the first time."""
        segment, run = self.program.segments[index], self.program.runs[index][block]
        self._network.turn.block, self._network.turn.doing = block, Doing.COMPUTE
        for tensor in self._network.written_over(segment):
            tensors[tensor] = tensors[tensor].clone()
        with self._cast(), self._statistics.still(segment.nodes):
            for k, action in zip(segment.nodes, run.actions, strict=True):
                layer = self._network.layers[k]
                given = zip(action.inputs, self._network.graph.sources[k], strict=True)
                windows = [bring.padded(bring.cut(tensors[source]), layer.fill) for bring, source in given]
                tensors[k + 1] = self._statistics.compute(k, action.place, windows)
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

    def _differentiate(self, index: int, block: int, loss: LossOf | None = None) -> None:
        segment, run = self.program.segments[index], self.program.runs[index][block]
        gradient = None if loss is not None else self._gradients.take(segment.leaving[0], block)
        windows = self._windows(index, block)
        with torch.enable_grad():
            for tensor, x_BCHW in windows.items():
                windows[tensor] = x_BCHW.detach().requires_grad_(self._wants[tensor])
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
        gradient = self._statistics.with_gradient(tensor, block, y_BCHW.detach(), gradient)
        if gradient is None and self.program.ranks.size > 1:
            gradient = torch.zeros_like(y_BCHW)
        if gradient is not None:
            self._network.turn.doing = Doing.DIFFERENTIATE
            y_BCHW.backward(gradient)
