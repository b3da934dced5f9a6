"""What follows from the edges of a graph, and what is refused."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.geometry.drawn import law, networks, unets
from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import INPUT, Graph, Node, one_of_equals
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.joins import Add, Concatenate, ImageMean
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.pixelwise import Activation, Dropout, Mark, Norm, Sigmoid
from tiledseg.geometry.layers.resampling import MaxIndices

CONV = Convolution(1, 1)


@pytest.mark.parametrize(
    ("nodes", "outputs", "fault"),
    [
        ([Node("a", Mark()), Node("b", CONV, (INPUT,))], (), "nobody takes 'a'"),
        ([Node("b", Concatenate(), ("a", INPUT))], (), "'b' takes 'a', which no node before it makes"),
        ([Node(INPUT, Add())], (), "two nodes are called 'input'; 'input' takes 2 tensors and is given 1"),
        ([Node("a", CONV)], ("a", "b"), "'b' is an output that no node makes"),
    ],
)
def test_each_fault_is_named(nodes: list[Node], outputs: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        Graph(tuple(nodes), outputs)


@law
@given(st.one_of(networks(), unets.map(UNet.graph)))
def test_cutting_anywhere_loses_nothing(graph: Graph) -> None:
    """What leaves the first part and later ones take is what enters the second; tensors go once nobody takes them."""
    for cut in range(1, len(graph)):
        entering, leaving = graph.entering(cut, len(graph)), graph.leaving(0, cut)
        assert set(leaving) <= set(entering) | set(graph.results)
        assert {tensor for tensor in entering if tensor} <= set(leaving)
    live = {0}
    for k, sources in enumerate(graph.sources):
        assert live.issuperset(sources)
        live = (live | {k + 1}) - set(graph.released[k])
    assert live == set(graph.results)


def overwriting(*nodes: Node, outputs: tuple[str, ...] = ()) -> list[str]:
    graph = Graph(nodes, outputs)
    return [node.name for node, writes in zip(graph.nodes, graph.overwrites, strict=True) if writes]


CONV_NODE, ACT = Node("conv", CONV), Node("act", Activation())


@pytest.mark.parametrize("between", [(), (Mark(),), (Mark(), Mark()), (Norm("batch"),), (Dropout(0.5),)])
def test_an_activation_writes_over_what_nobody_else_takes(between: tuple[Layer, ...]) -> None:
    """By whatever name: stash, activation, pop would else hand on the activated tensor, and nothing would say so."""
    nodes = [Node(str(number), layer) for number, layer in enumerate(between)]
    assert overwriting(CONV_NODE, *nodes, ACT) == ["act"]
    names = ["conv", *(node.name for node in nodes)] if all(layer.hands_on for layer in between) else []
    for taken in names:
        assert overwriting(CONV_NODE, *nodes, ACT, Node("sum", Add(), (taken, "act"))) == []
        assert overwriting(CONV_NODE, *nodes, ACT, outputs=("act", taken)) == []


def test_an_activation_does_not_write_over_what_a_backward_pass_or_the_caller_needs() -> None:
    assert overwriting(ACT, CONV_NODE) == []
    assert overwriting(Node("mark", Mark()), ACT) == []
    for layer in (Sigmoid(), Activation(), ImageMean()):
        assert "act" not in overwriting(CONV_NODE, Node("before", layer), ACT)


def test_integers_have_no_gradient() -> None:
    graph = Graph((CONV_NODE, Node("indices", MaxIndices())))
    assert graph.wants_gradient == (False, True, False)


def test_equal_graphs_are_remembered_as_one_and_carry_no_hash_to_another_process() -> None:
    graph, other = UNet(2, 2).graph(), UNet(2, 2).graph()
    assert graph is not other
    assert hash(graph) == hash(other)
    assert one_of_equals(graph) is one_of_equals(other)
    assert one_of_equals(UNet(3, 2).graph()) is not one_of_equals(graph)
    told = pickle.loads(pickle.dumps(graph))  # a word's hash differs from process to process
    assert "_hash" not in vars(told)
    assert told == graph
