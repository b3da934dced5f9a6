"""Laws of the plan of a whole network: it can be carried out, is exact, and computes nothing twice where it need not.

`follow` is the oracle: it carries a plan out with intervals instead of tensors and checks every step.
"""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.geometry.drawn import law, layers, line, networks, partitions, unets
from tiledseg.architecture.unet import UNet
from tiledseg.errors import GeometryError
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.joins import Concatenate
from tiledseg.geometry.layers.pixelwise import Mark
from tiledseg.geometry.layers.resampling import MaxPool, Pool, Upsample
from tiledseg.geometry.shapes import is_legal_size, total_stride
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import WHOLE, NodeWindows, layer_blocks, layer_windows, settle
from tiledseg.geometry.tiling import make_tiling

fusions = st.sampled_from([1, 2, 3, WHOLE])
Plan = tuple[NodeWindows, ...]
JOIN = Node("pop", Concatenate(), ("stash", "up"))


def planned(graph: Graph, partition: Partition, fusion: int, early: bool = True) -> Plan | None:
    try:
        return layer_windows(graph, partition, fusion, early)
    except GeometryError:
        return None


def follow(graph: Graph, plan: Plan, partition: Partition) -> None:
    """Every rank has what it computes from, or an exchange brings it from owners who have theirs."""
    for rank in range(partition.parts):
        extents = [partition.blocks[rank]]
        for k, at in enumerate(plan):
            layer, out = at.node.layer, at.given[rank]
            for index, (one, source) in enumerate(zip(at.inputs, graph.sources[k], strict=True)):
                read = one.read[rank]
                needed = one.partition.blocks[rank] if one.exchanged else read.clip(one.partition.whole)
                assert extents[source].contains(needed), f"{at.node.name} reads what is not there"
                assert one.held[rank] == needed or (one.held[rank] == read and _after_padding(graph, plan, k))
                assert read.contains(layer.required_input(out, index).clip(one.partition.whole))
                assert layer.arity == 1 or one.partition.whole.contains(read)
                if layer.statistics:
                    assert read.contains(one.partition.blocks[rank]), "statistics miss owned pixels"
            assert out.size
            assert at.output.whole.contains(out) or layer.keeps_zero
            extents.append(out)
        assert extents[graph.results[0]] == plan[graph.results[0] - 1].output.blocks[rank]


def _after_padding(graph: Graph, plan: Plan, k: int) -> bool:
    """Whether nothing but layers that keep zeros lie between an exchange, which has padded, and this node."""
    while graph.sources[k][0]:
        k = graph.sources[k][0] - 1
        if plan[k].exchanges or not graph.layers[k].keeps_zero:
            return plan[k].exchanges
    return False


@st.composite
def padded_unets(draw: st.DrawFn) -> tuple[UNet, Partition]:
    """A padded U-Net and an input cut on its alignment."""
    unet = draw(unets.filter(lambda u: u.padding == "same"))
    unit = total_stride(unet.graph())
    edges = draw(partitions(largest=8)).edges
    return unet, Partition(tuple(edge * unit for edge in edges))


@law
@given(padded_unets())
def test_thin_halos_compute_nothing_twice_in_padded_unets(drawn: tuple[UNet, Partition]) -> None:
    """E = 1: each rank gives its own block of every tensor; but activations, which have no multiply-adds, work on the
    halo too where it is there already."""
    unet, partition = drawn
    assert settle(unet.graph(), partition) == partition
    for at in layer_windows(unet.graph(), partition, 1):
        assert at.given == at.output.blocks or at.node.layer.keeps_zero
        assert not (isinstance(at.node.layer, Concatenate | Pool) and at.exchanges)


@st.composite
def unpadded_unets(draw: st.DrawFn) -> tuple[UNet, Partition]:
    """An unpadded U-Net, a legal size, and blocks that can be cut through all its levels."""
    unet = draw(unets.filter(lambda u: u.padding == "valid"))
    sequence, unit = unet.graph(), total_stride(unet.graph())
    parts = draw(st.integers(1, 4))
    smallest = next(n for n in itertools.count(4 * unit * parts) if is_legal_size(sequence, n))
    size = smallest + unit * draw(st.integers(0, 12))
    jitter = [draw(st.integers(-unit, unit)) for _ in range(parts + 1)]
    even = Partition.even(size, parts).edges
    return unet, Partition((0, *(e + j for e, j in zip(even[1:-1], jitter, strict=False)), size))


@law
@given(unpadded_unets())
def test_settled_edges_leave_halos_to_convolutions_and_bilinear_upsampling(drawn: tuple[UNet, Partition]) -> None:
    """And they are near: within the alignment of where they were."""
    unet, partition = drawn
    sequence = unet.graph()
    settled = settle(sequence, partition)
    assert settled.parts == partition.parts
    assert settled.size == partition.size
    assert all(abs(a - b) <= total_stride(sequence) for a, b in zip(settled.edges, partition.edges, strict=True))
    plan = planned(sequence, settled, 1)
    assume(plan is not None)
    for at in plan:
        bilinear = isinstance(at.node.layer, Upsample) and at.node.layer.mode == "bilinear"
        assert not at.exchanges or isinstance(at.node.layer, Convolution) or at.node.layer.keeps_zero or bilinear
        assert at.given == at.output.blocks or at.node.layer.keeps_zero


@law
@given(
    st.one_of(networks(), st.lists(layers, min_size=1, max_size=5).map(lambda each: line(*each))),
    st.integers(3, 12),
    st.data(),
    fusions,
)
def test_a_plan_can_be_carried_out_by_every_rank(
    sequence: Graph, quarter: int, data: st.DataObject, fusion: int
) -> None:
    """One rank exchanges nothing. An exchange serves as many layers as asked, and is planned where one needs it. An
    early one brings the same before an activation."""
    partition = data.draw(partitions(size=4 * quarter))
    plan, late = planned(sequence, partition, fusion), planned(sequence, partition, fusion, early=False)
    assume(plan is not None and late is not None)
    follow(sequence, plan, partition)
    assert [at.node for at in plan] == list(sequence.nodes)
    cuts = [partition, *(at.output for at in plan)]
    assert sum(at.exchanges for at in plan) == sum(at.exchanges for at in late)
    since = [0]  # of each tensor, the halos on the longest way from an exchange
    for at, after, sources in zip(plan, late, sequence.sources, strict=True):
        assert [given.partition for given in at.inputs] == [cuts[source] for source in sources]
        same = ([i.read for i in at.inputs], at.given) == ([i.read for i in after.inputs], after.given)
        assert same or at.node.layer.keeps_zero
        longest = 0
        for index, (one, source) in enumerate(zip(after.inputs, sources, strict=True)):
            wants = [at.node.layer.required_input(out, index).clip(one.partition.whole) for out in at.output.blocks]
            needs = not all(own.contains(w) for own, w in zip(one.partition.blocks, wants, strict=True))
            assert needs or not one.exchanged
            longest = max(longest, (0 if one.exchanged else since[source]) + (needs and at.node.layer.arity == 1))
        assert longest <= fusion
        since.append(longest)
    alone = planned(sequence, Partition((0, 4 * quarter)), fusion)
    if alone is not None:
        assert not any(at.exchanges or at.given != at.output.blocks for at in alone)


@pytest.mark.parametrize(
    ("nodes", "edges", "words"),
    [
        (
            (Node("stash", Mark()), Node("pool", MaxPool()), Node("up", Upsample()), JOIN),
            (0, 4, 9),
            "layer 'pop': it joins tensors of 9 and 8 positions.* another input size",
        ),
        ((Node("pool", MaxPool()),), (0, 3, 4, 5), "'pool' gives 2 .* 3 ranks share, and none .* rank 1 .* use fewer"),
        ((Node("conv", Convolution(1, 7)),), (0, 2, 3), "'conv' gives 0 positions"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_name(nodes: tuple[Node, ...], edges: tuple[int, ...], words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        layer_windows(Graph(nodes), Partition(edges))


def test_a_rank_without_a_pixel_of_the_raster_is_refused() -> None:
    """Along one dim too: an unpadded network's outputs reach beyond a raster of 5 rows, which the first rank has."""
    graph = UNet(3, 1, base_channels=2, padding="valid").graph()
    for raster, ranks in (((5, 200), (2, 1)), ((200, 5), (1, 2))):
        last = f"the rank at ({ranks[0] - 1}, {ranks[1] - 1}) of {ranks[0]} x {ranks[1]} would own no pixel"
        with pytest.raises(GeometryError, match=re.escape(last)):
            layer_blocks(make_tiling(raster, ranks, network_footprint(graph)), graph, ranks)
