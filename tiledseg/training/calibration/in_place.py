"""How long each layer of a network takes where it runs: with its neighbours, and what it saved gone from the caches.

A layer measured by itself finds its input in a cache, which the backward pass of a network does not. So a whole step is
run, and moments are noted between its layers: forward after each node; backward when the gradient of a node's output
is there, which is when its own backward pass begins, for autograd goes from the last node to the first. A layer's
gradients of weights are added up in float64 as in a step: that is part of its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tiledseg.architecture.unet import UNet
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.execution.precision import PARAMETER_DTYPES, autocast
from tiledseg.geometry.graph import Graph
from tiledseg.gradients import GradientReducer
from tiledseg.models.network import Tensors, build_modules, run_nodes
from tiledseg.pipeline.layer_times import LayerTime
from tiledseg.training.losses.objective import pixel_sums


def layer_times(network: UNet, side: int, precision: str, repeats: int) -> list[LayerTime]:
    """Seconds of every node on a square image, on the CPU: of some steps after a first one the least of each, for what
    disturbs a machine makes it slower, times what makes them the quickest whole step, in which not all are quickest."""
    graph = network.graph()
    module = build_modules(network, 0).to(PARAMETER_DTYPES[precision]).train()
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
    layers = list(module.layers.values())
    reducer = GradientReducer(module.parameters(), SerialCommunicator())
    x_BCHW = torch.rand(1, network.bands, side, side, dtype=PARAMETER_DTYPES[precision])
    x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
    found = []
    for _ in range(1 + repeats):
        noted = _Moments([0.0] * len(graph), {})
        reducer.zero()

        def compute(k: int, inputs: list[torch.Tensor], noted: _Moments = noted) -> torch.Tensor:
            begun = time.perf_counter()
            made: torch.Tensor = layers[k](*inputs)
            noted.forward[k] = time.perf_counter() - begun
            if not graph.layers[k].hands_on and made.requires_grad:
                made.register_hook(noted.at(k))
            return made

        tensors: Tensors = {0: x_BCHW}
        with autocast(precision, x_BCHW.device):
            run_nodes(graph, compute, tensors, 0, len(graph))
        logits_BKHW = tensors.pop(len(graph))
        target_BHW = torch.zeros(1, *logits_BKHW.shape[2:], dtype=torch.long)
        loss = pixel_sums(logits_BKHW, target_BHW, 255)[0]
        del logits_BKHW
        loss.backward()
        found.append((noted.forward, noted.backward(len(graph), time.perf_counter())))
    reducer.close()
    return _untangled(graph, _quickest(found[1:]))


def _quickest(steps: Sequence[tuple[list[float], list[float]]]) -> list[LayerTime]:
    """Of the nodes' seconds forward and backward in each step."""
    passes = zip(*steps, strict=True)
    forward, backward = ([min(times) for times in zip(*each, strict=True)] for each in passes)
    whole = min(sum(there) + sum(back) for there, back in steps)
    longer = whole / (sum(forward) + sum(backward))
    return [LayerTime(longer * there, longer * back) for there, back in zip(forward, backward, strict=True)]


def _untangled(graph: Graph, times: list[LayerTime]) -> list[LayerTime]:
    """Where a view is written over, autograd goes back through the writer and the view's maker at once: the maker has
    what the writer, which moves three tensors for two forward, does not need."""
    for k, sources in enumerate(graph.sources):
        maker = sources[0] - 1
        if graph.overwrites[k] and graph.layers[maker].returns_view and not times[maker].backward:
            own = min(1.5 * times[k].forward, times[k].backward)
            times[maker] = times[maker]._replace(backward=times[k].backward - own)
            times[k] = times[k]._replace(backward=own)
    return times


@dataclass
class _Moments:
    """Seconds of each node forward, and the moment at which the gradient of its output was there."""

    forward: list[float]
    begun: dict[int, float] = field(default_factory=dict)

    def at(self, k: int) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self.begun[k] = time.perf_counter()

        return note

    def backward(self, nodes: int, end: float) -> list[float]:
        """Of each node, until the next one that has begun, or the `end`."""
        order = sorted(self.begun, key=lambda k: self.begun[k])
        ends = [*(self.begun[k] for k in order[1:]), end]
        seconds = [0.0] * nodes
        for k, after in zip(order, ends, strict=True):
            seconds[k] = after - self.begun[k]
        return seconds
