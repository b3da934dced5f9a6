"""Passes in which all images of a step go through the network together, node by node.

A batch norm that learns takes its statistics over all pixels of a step. So the images of a rank run up to such a norm,
a batch of one shape after the other. The norm takes all of them, with those of the other ranks, and they run on. All
are held until the backward pass, which is one. Which images make a batch follows from the step alone, and a replica
takes whole batches. Each batch has a use of the weights of its own, and a norm has its weights in float64: so the
gradients of batches are summed in float64, on any number of ranks alike.

Deadlock cannot arise: every rank makes the norms' sums over `axes.weights` in the order of the nodes, and backward in
the opposite one, in which autograd runs functions too: later made, earlier run. A rank without an image in a step sums
zeros at the same places. The sums of gradients, on the same communicator, start after the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from tiledseg.comm.doing import doing
from tiledseg.execution.halos.halo_modes import LayerMode
from tiledseg.execution.halos.part import MicroBatch, Part, Piece
from tiledseg.execution.passes.part_passes import Key, Loss, SerialPasses, TimedSamples, batched, unbatched
from tiledseg.geometry.graph import Graph
from tiledseg.gradients import GradientReducer
from tiledseg.models.dropout import dropouts, set_dropout_key
from tiledseg.models.frozen import Lending
from tiledseg.models.network import Tensors
from tiledseg.raster.samples.dataset import Sample

_Batch = tuple[list[Sample], list[MicroBatch], Tensors]  # images of one shape on their way through the network


class StepPasses(SerialPasses):
    """Serial passes, but for training: there all images of a step go together."""

    mode: LayerMode

    def __init__(self, mode: LayerMode) -> None:
        super().__init__(mode)
        self._norms = step_norms(mode.network.graph)
        self._lending = Lending(mode.network.layers.values())
        self._dropouts = nn.ModuleList(dropouts(mode.network))  # each image tells them before each run of nodes

    def train(
        self, samples: Iterator[Sample], parts: Sequence[Part], key: Key, loss: Loss, reducer: GradientReducer
    ) -> float:
        timed = TimedSamples(samples)
        nodes = len(self.mode.network.graph)
        batches = [self._loaded(batch, timed) for batch in self.mode.batches(parts)]
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
            self._backward(loss([piece for batch in batches for piece in self._pieces(*batch)]), len(batches))
        return timed.seconds

    def rounds(self, parts: Sequence[Part], looks_first: bool) -> int:
        return 1  # all are at hand together

    def _loaded(self, batch: Sequence[Part], samples: Iterator[Sample]) -> _Batch:
        own = [next(samples) for _ in batch]
        inputs_BCHW = [x_BCHW for sample in own for x_BCHW in self.mode.inputs(sample)]
        return own, self._micro_batches(batch), {0: batched(inputs_BCHW)}

    def _pieces(
        self, own: list[Sample], micro_batches: list[MicroBatch], tensors: Tensors
    ) -> Iterator[tuple[Piece, Sample]]:
        outputs = zip(*(unbatched(tensors.pop(result)) for result in self.mode.network.graph.results), strict=True)
        for micro_batch, sample, outputs_BKHW in zip(micro_batches, own, outputs, strict=True):
            yield micro_batch.piece(*outputs_BKHW), sample

    def _backward(self, loss: torch.Tensor, images: int) -> None:
        if images:
            loss.backward()
            return
        graph = self.mode.network.graph
        for k in reversed(self._norms):
            if graph.wants_gradient[graph.sources[k][0]]:  # else autograd sums nothing on the other ranks
                self.mode.no_gradients(k)


def step_norms(graph: Graph) -> tuple[int, ...]:
    """Return the nodes that take statistics over all images of a step."""
    return tuple(k for k, layer in enumerate(graph.layers) if layer.statistics == "batch")
