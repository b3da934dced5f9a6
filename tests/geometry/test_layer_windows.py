"""Laws of the plan of a whole network: it can be carried out, is exact, and computes nothing twice where it need not.

`follow` is the oracle: it carries a plan out with intervals instead of tensors and checks every step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.geometry.drawn import law, layers, networks, partitions, unets
from tiledseg.architecture.unet import UNet
from tiledseg.errors import GeometryError
from tiledseg.geometry.decomposition import Partition
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layer import Convolution, Layer, MaxPool, Norm, Pool, PopConcatenate, Stash, Upsample
from tiledseg.geometry.layer_windows import WHOLE, LayerWindows, layer_windows, settle
from tiledseg.geometry.receptive_field import is_legal_size, total_stride

fusions = st.sampled_from([1, 2, 3, WHOLE])
Plan = tuple[LayerWindows, ...]


def planned(sequence: tuple[Layer, ...], partition: Partition, fusion: int, early: bool = True) -> Plan | None:
    try:
        return layer_windows(sequence, partition, fusion, early)
    except GeometryError:
        return None


def follow(plan: Plan, partition: Partition) -> None:
    """Every rank has what it computes from, or an exchange brings it from owners who have theirs."""
    for rank in range(partition.parts):
        extent, stashed = partition.owned(rank), {}
        for at in plan:
            layer, read, out = at.layer, at.read[rank], at.given[rank]
            if isinstance(layer, PopConcatenate):
                assert at.skip[rank] == out.shift(layer.crop)
                assert at.skip_partition.whole.contains(at.skip[rank])
                needed = at.skip_partition.owned(rank) if at.exchanged else at.skip[rank]
                assert stashed[layer.skip].contains(needed), "the skip was not kept so far"
                assert extent.contains(out)
            else:
                needed = at.input.owned(rank) if at.exchanged else read.clip(at.input.whole)
                assert extent.contains(needed), f"{layer.name} reads what is not there"
                assert at.held[rank] == needed or (at.held[rank] == read and _behind_padding(plan, at))
                assert read.contains(layer.required_input(out).clip(at.input.whole))
            if isinstance(layer, Norm) and layer.kind == "batch":
                assert read.contains(at.input.owned(rank)), "statistics miss owned pixels"
            assert out.size
            assert at.output.whole.contains(out) or layer.keeps_zero
            extent = out
            if isinstance(layer, Stash):
                stashed[layer.skip] = extent
        assert extent == plan[-1].output.owned(rank)


def _behind_padding(plan: Plan, at: LayerWindows) -> bool:
    """Whether nothing but layers that keep zeros lie between an exchange, which has padded, and this layer."""
    before = plan[: plan.index(at)][::-1]
    return next((b.exchanged for b in before if b.exchanged or not b.layer.keeps_zero), False)


@law
@given(networks(), st.integers(3, 12), st.data(), fusions)
def test_a_plan_can_be_carried_out_by_every_rank(
    sequence: tuple[Layer, ...], quarter: int, data: st.DataObject, fusion: int
) -> None:
    partition = data.draw(partitions(size=4 * quarter))
    plan = planned(sequence, partition, fusion)
    assume(plan is not None)
    follow(plan, partition)
    assert [at.layer for at in plan] == list(sequence)
    assert plan[0].input == partition
    assert all(a.output == b.input for a, b in itertools.pairwise(plan))


@law
@given(st.lists(layers, min_size=1, max_size=5).map(tuple), partitions(), fusions)
def test_a_plan_of_any_chain_can_be_carried_out(sequence: tuple[Layer, ...], partition: Partition, fusion: int) -> None:
    plan = planned(sequence, partition, fusion)
    assume(plan is not None)
    follow(plan, partition)


@law
@given(networks(), st.integers(3, 12), st.data(), fusions)
def test_an_exchange_serves_as_many_layers_as_asked_and_one_that_no_layer_needs_is_not_planned(
    sequence: tuple[Layer, ...], quarter: int, data: st.DataObject, fusion: int
) -> None:
    partition = data.draw(partitions(size=4 * quarter))
    plan = planned(sequence, partition, fusion, early=False)
    assume(plan is not None)
    since = None
    for at in plan:
        if isinstance(at.layer, PopConcatenate):
            continue
        wants = [at.layer.required_input(out).clip(at.input.whole) for out in at.output.blocks]
        needs = not all(own.contains(w) for own, w in zip(at.input.blocks, wants, strict=True))
        assert needs or not at.exchanged
        if needs:
            since = 1 if at.exchanged else since + 1
            assert since <= fusion


@st.composite
def padded_unets(draw: st.DrawFn) -> tuple[UNet, Partition]:
    """A padded U-Net and an input cut on its alignment."""
    unet = draw(unets.filter(lambda u: u.padding == "same"))
    unit = total_stride(unet.layers())
    edges = draw(partitions(largest=8)).edges
    return unet, Partition(tuple(edge * unit for edge in edges))


@law
@given(padded_unets())
def test_thin_halos_compute_nothing_twice_in_padded_unets(drawn: tuple[UNet, Partition]) -> None:
    """E = 1: each rank gives its own block of every tensor; but activations, which have no multiply-adds, work on the
    halo too where it is there already."""
    unet, partition = drawn
    for at in layer_windows(unet.layers(), partition, 1):
        assert at.given == at.output.blocks or at.layer.keeps_zero
        assert not (isinstance(at.layer, PopConcatenate | Pool) and at.exchanged)


@law
@given(padded_unets(), st.integers(1, 6))
def test_runs_of_a_padded_unet(drawn: tuple[UNet, Partition], fusion: int) -> None:
    """Exchanges fall as runs grow; the longest is one exchange of the network's input, or none for one rank."""
    unet, partition = drawn
    sequence = unet.layers()
    counts = [sum(at.exchanged for at in layer_windows(sequence, partition, f)) for f in (1, fusion, fusion + 1, WHOLE)]
    assert counts[0] >= counts[1] >= counts[3]
    assert counts[0] >= counts[2] >= counts[3]
    halos = any(isinstance(layer, Convolution) and layer.kernel > 1 for layer in sequence)
    bilinear = any(isinstance(layer, Upsample) and layer.mode == "bilinear" for layer in sequence)
    assert counts[3] == int(partition.parts > 1 and (halos or bilinear))


@law
@given(networks(), st.integers(2, 12), fusions)
def test_one_rank_exchanges_nothing(sequence: tuple[Layer, ...], quarter: int, fusion: int) -> None:
    plan = planned(sequence, Partition((0, 4 * quarter)), fusion)
    assume(plan is not None)
    assert not any(at.exchanged for at in plan)
    assert all(at.given == at.output.blocks for at in plan)


@st.composite
def unpadded_unets(draw: st.DrawFn) -> tuple[UNet, Partition]:
    """An unpadded U-Net, a legal size, and blocks that can be cut through all its levels."""
    unet = draw(unets.filter(lambda u: u.padding == "valid"))
    sequence, unit = unet.layers(), total_stride(unet.layers())
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
    sequence = unet.layers()
    settled = settle(sequence, partition)
    assert settled.parts == partition.parts
    assert settled.size == partition.size
    assert all(abs(a - b) <= total_stride(sequence) for a, b in zip(settled.edges, partition.edges, strict=True))
    plan = planned(sequence, settled, 1)
    assume(plan is not None)
    for at in plan:
        bilinear = isinstance(at.layer, Upsample) and at.layer.mode == "bilinear"
        assert not at.exchanged or isinstance(at.layer, Convolution) or at.layer.keeps_zero or bilinear
        assert at.given == at.output.blocks or at.layer.keeps_zero


@law
@given(networks(), partitions(), st.integers(1, 4))
def test_an_early_exchange_brings_the_same(sequence: tuple[Layer, ...], partition: Partition, fusion: int) -> None:
    """It only comes before activations: as many exchanges, and the same windows for every other layer."""
    late = planned(sequence, partition, fusion, early=False)
    early = planned(sequence, partition, fusion)
    assume(late is not None and early is not None)
    assert sum(at.exchanged for at in early) == sum(at.exchanged for at in late)
    for a, b in zip(early, late, strict=True):
        assert a.layer.keeps_zero or (a.read, a.given) == (b.read, b.given)


@law
@given(padded_unets())
def test_edges_on_the_alignment_of_a_padded_unet_are_settled_already(drawn: tuple[UNet, Partition]) -> None:
    unet, partition = drawn
    assert settle(unet.layers(), partition) == partition


@law
@given(networks(), partitions())
def test_settling_keeps_blocks(sequence: tuple[Layer, ...], partition: Partition) -> None:
    """Where no place fits, the edge stays; never does one pass another."""
    settled = settle(sequence, partition)
    assert (settled.parts, settled.size) == (partition.parts, partition.size)


HALVED: Sequence[Layer] = (Stash("stash", "skip"), MaxPool("pool"), Upsample("up"), PopConcatenate("pop", "skip", 1))


def test_a_skip_that_does_not_fit_is_refused() -> None:
    with pytest.raises(GeometryError, match=r"layer 'pop' concatenates 8 positions with a skip of 9.* another input"):
        layer_windows(tuple(HALVED), Partition((0, 4, 9)))


@pytest.mark.parametrize("fusion", [0, -3])
def test_a_fusion_of_no_layers_is_refused(fusion: int) -> None:
    with pytest.raises(GeometryError, match=f"fusion of {fusion} layers; give at least 1"):
        layer_windows((Layer("keep"),), Partition((0, 4)), fusion)


def test_a_rank_without_pixels_in_the_depths_is_refused_by_the_layer_that_takes_them() -> None:
    deep = tuple(MaxPool(f"pool{i}") for i in range(3))
    with pytest.raises(GeometryError, match="'pool2' gives 3 positions along a dim that 3 ranks share"):
        layer_windows(deep, Partition((0, 4, 6, 24)))


def test_a_norm_sees_the_pixels_that_later_layers_drop() -> None:
    sequence = (Norm("norm", "batch"), Convolution("every third", 1, 1, 3))
    partition = Partition((0, 5, 11))
    plan = layer_windows(sequence, partition)
    assert plan[0].read == partition.blocks
    assert plan[1].read == (Interval(0, 4), Interval(6, 10))
    follow(plan, partition)


def test_a_skip_cut_elsewhere_than_its_tensor_travels() -> None:
    """With nothing that needs a halo between them, and with nothing before the skip that could bring it along."""
    sequence = (Stash("stash", "skip"), Convolution("half", 1, 1, 2), Upsample("up"), PopConcatenate("pop", "skip", 1))
    partition = Partition((0, 5, 10))
    plan = layer_windows(sequence, partition)
    assert [at.exchanged for at in plan] == [False, False, False, True]
    assert plan[-1].exchange(0).receives[0].part == Interval(5, 6)
    follow(plan, partition)
