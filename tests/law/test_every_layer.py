"""Every layer has a module of its shapes, weights and memory; `test_steps.py` holds them to the law."""

from __future__ import annotations

import pytest
import torch

from tests.law.every_layer import EveryLayer, ForeignLayers
from tests.planning.allocated import measured, planned
from tiledseg.geometry.layers.joins import ImageAttention
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.shapes import count_parameters, tensor_shapes
from tiledseg.models.blocks import BUILDERS
from tiledseg.models.network import build_modules


@pytest.mark.parametrize("kind", [EveryLayer, ForeignLayers])
def test_the_module_has_the_shapes_and_weights_that_its_layers_say(kind: type[EveryLayer]) -> None:
    graph = kind(whole=True).graph()
    network = build_modules(kind(whole=True), seed=0)
    found: list[tuple[int, ...]] = []
    for module in network.layers.values():
        module.register_forward_hook(lambda module, inputs, output: found.append(tuple(output.shape[1:])))
    network(torch.randn(1, 2, 24, 16))
    assert found == list(tensor_shapes(graph, 2, 24, 16)[1:])
    assert sum(parameter.numel() for parameter in network.parameters()) == count_parameters(graph, 2)


def test_the_memory_of_a_step_is_that_of_torch() -> None:
    """All that is allocated at once: within 0.1 %."""
    _, peak = measured(build_modules(EveryLayer(), seed=0), (256, 256))
    assert planned(EveryLayer().graph(), 2, (256, 256))[1] == pytest.approx(peak, rel=0.001)


def kinds(layer: type[Layer] = Layer) -> set[str]:
    return {layer.__name__}.union(*map(kinds, layer.__subclasses__()))


def test_every_layer_has_a_module_and_is_in_a_network_here() -> None:
    bases = {"Layer", "Enlarging", "_Weighted", "Pool", "Join", "ImageLayer", "Leaf"}
    # Steps of the planner's walk; what tracing alone makes, with its modules, or takes over.
    elsewhere = {"MovedLayer", "PooledBranch", "ZeroAtZero", "DeclaredLeaf", "WholeLeaf", "Positions"}
    elsewhere |= {"Returned", "Crops"}
    assert kinds() - bases - elsewhere == {layer.__name__ for layer in BUILDERS}
    graphs = [kind(whole).graph() for kind in (EveryLayer, ForeignLayers) for whole in (False, True)]
    # Attention, which no blocks have: tests/spatial/test_attention.py.
    assert set(BUILDERS) - {ImageAttention} <= {type(layer) for graph in graphs for layer in graph.layers}
