"""Whether a network's halo is what its outputs depend on: asked of gradients, not of geometry."""

from __future__ import annotations

import torch
from torch import nn

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import is_legal_size, required_input, total_stride
from tiledseg.models.network import GraphNetwork

DRAWS = 3


def check_halo(network: GraphNetwork) -> tuple[Interval, Interval]:
    """The rows and columns of the input on which an output pixel depends, as gradients say, counted from its own place.

    Raises GeometryError where an output of the network, in evaluation, depends on a pixel that the geometry of its
    graph leaves out: its tiles would not be exact. Networks that take the mean of an image depend on all of it, and
    cannot be asked. Costs a forward and a backward pass on an image of a few times the halo.
    """
    if any(node.layer.statistics and not node.layer.tracks for node in network.graph.nodes):
        raise GeometryError("each output depends on the whole image, of which the network takes statistics: no halo")
    dims = network.graph, network.graph.along_columns
    size, at = _place(dims)
    needs = [required_input(graph, Interval(at, at + 1)) for graph in dims]
    reached = _reached(network, size, at)
    for word, need, found in zip(("rows", "columns"), needs, reached, strict=True):
        if not need.contains(found):
            raise GeometryError(
                f"output {at} depends on {word} {found.start} to {found.stop - 1}, but the network's geometry says "
                f"{need.start} to {need.stop - 1}: its tiles would not be exact; please report the module"
            )
    return reached[0].shift(-at), reached[1].shift(-at)


def _place(dims: tuple[Graph, Graph]) -> tuple[int, int]:
    """A legal size, and an output about its middle whose whole field lies within it."""
    stride = total_stride(dims[0])
    far = max(need.stop + abs(need.start) for need in (required_input(graph, Interval(0, stride)) for graph in dims))
    at = -(-2 * far // stride) * stride
    sizes = range(2 * at + far, 2 * at + far + 4 * stride)
    size = next(n for n in sorted(sizes, key=lambda n: n % stride > 0) if is_legal_size(dims[0], n))
    return size, at


def _reached(network: GraphNetwork, size: int, at: int) -> tuple[Interval, Interval]:
    """The rows and columns with a gradient, over a few draws: maxima hide all inputs but one."""
    weight = next(network.parameters(), torch.zeros(()))
    modes = [(module, module.training) for module in network.modules()]
    nn.Module.train(network, False)
    total_HW = torch.zeros(size, size)
    for seed in range(DRAWS):
        draw = torch.Generator().manual_seed(seed)
        x_BCHW = torch.randn(1, network.bands, size, size, generator=draw).to(weight).requires_grad_()
        y_BKHW = network(x_BCHW)
        first = y_BKHW if isinstance(y_BKHW, torch.Tensor) else y_BKHW[0]
        pixel = first[:, :, at, at]
        weighed = pixel * torch.randn(pixel.shape, generator=draw).to(pixel)  # the sum of shares is 1, whatever it sees
        (gradient_BCHW,) = torch.autograd.grad(weighed.sum(), x_BCHW)
        total_HW += gradient_BCHW.abs().sum((0, 1)).cpu()
    for module, training in modes:
        module.training = training
    return _support(total_HW.sum(1)), _support(total_HW.sum(0))


def _support(values: torch.Tensor) -> Interval:
    found = values.nonzero()[:, 0]
    return Interval(int(found[0]), int(found[-1]) + 1)
