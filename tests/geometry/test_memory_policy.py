"""Policies of memory: what is kept, what is rebuilt, and that each rebuilt tensor can be."""

from __future__ import annotations

import pytest

from tests.geometry.drawn import chain
from tiledseg.architecture.presets import KINDS
from tiledseg.architecture.unet import UNet
from tiledseg.geometry.graph import KEEP, REBUILD, Graph, MemoryPolicy, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.joins import Concatenate
from tiledseg.geometry.layers.pixelwise import Activation, Mark, Norm
from tiledseg.geometry.memory_policy import (
    asked,
    can_rebuild,
    held,
    homes,
    keep_all,
    makers,
    origins_of,
    recomputation,
)


def convolution(channels: int = 8) -> Convolution:
    return Convolution(channels, 3, padding=1)


def names(graph: Graph, policy: MemoryPolicy) -> set[str]:
    return {name for name, there in zip(graph.names, held(graph, policy), strict=True) if there}


def test_an_activation_that_writes_over_a_convolution_is_one_with_it() -> None:
    graph = chain([("conv", convolution()), ("act", Activation()), ("mark", Mark()), ("last", convolution())])
    assert homes(graph) == (0, 1, 1, 1, 4)
    assert makers(graph) == ((), (0, 1), (), (), (3,))
    assert origins_of(graph) == ((), (0,), (), (), (1,))
    assert asked(graph) == ((0,), (1, 3), (), (), ())


def test_a_norm_s_output_is_made_of_its_input() -> None:
    layers = [("conv", convolution()), ("norm", Norm("group")), ("act", Activation()), ("last", convolution())]
    graph = chain(layers)
    assert names(graph, keep_all(graph)) == {"input", "conv", "norm"}
    assert recomputation(graph).tensors == (KEEP, REBUILD, REBUILD, REBUILD, REBUILD)


def test_a_concatenation_is_made_of_its_parts_which_are_then_held() -> None:
    nodes = [
        Node("one", convolution()),
        Node("act", Activation()),
        Node("two", convolution()),
        Node("join", Concatenate(), ("act", "two")),
        Node("last", convolution()),
    ]
    graph = Graph(tuple(nodes))
    assert names(graph, keep_all(graph)) == {"input", "one", "join"}


def test_what_is_kept_of_the_standard_network() -> None:
    """Of a U-Net the skips, and the ends of the levels."""
    graph = UNet(3, norm="batch").graph()
    ends = {f"{part}.conv1" for part in ("encoder0", "encoder1", "bottom", "decoder1")}
    assert names(graph, recomputation(graph)) == {"input", *ends}


@pytest.mark.parametrize("name", KINDS)
def test_policies_fit_every_network(name: str) -> None:
    network = KINDS[name]()
    graph = network.graph()
    counts = []
    for policy in (keep_all(graph), recomputation(graph)):
        words = zip(policy.tensors, homes(graph), strict=True)
        for tensor, (word, home) in enumerate(words):
            assert word == policy.tensors[home]
            assert word != REBUILD or can_rebuild(graph, tensor)
        assert len(policy.inside) == len(graph)
        counts.append(sum(held(graph, policy)))
    assert counts[0] > counts[1]
