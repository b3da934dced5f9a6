"""Sizes of a rank's steps against the plan that is executed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.spread import UNETS
from tiledseg.geometry.box import Interval
from tiledseg.geometry.sharing.decomposition import Partition, plan_exchange
from tiledseg.geometry.sharing.layer_windows import WHOLE, layer_windows
from tiledseg.planning.walk.rank_steps import rank_kinds, rank_steps, swaps

law = settings(derandomize=True, max_examples=100, deadline=None)


@st.composite
def partitions_and_windows(draw: st.DrawFn) -> tuple[Partition, list[Interval]]:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    starts = st.integers(-5, edges[-1] + 4)
    windows = [Interval(start, start + draw(st.integers(0, 20))) for start in (draw(starts) for _ in sizes)]
    return Partition(tuple(edges)), windows


@law
@given(partitions_and_windows())
def test_swaps_are_those_of_the_plan(case: tuple[Partition, list[Interval]]) -> None:
    """For any windows: beyond the ends, wider than several blocks, away from the rank's own block, empty."""
    partition, windows = case
    for index, swap in enumerate(swaps(partition, windows)):
        plan = plan_exchange(partition, windows, index)
        for own, kept, parts in ((swap.sent, swap.kept, plan.sends), (swap.received, swap.kept, plan.receives)):
            sizes = {peer: part.size for peer, part in parts.items()}
            assert (sizes.pop(index, 0), tuple(sizes.values())) == (kept, own)


@law
@given(
    st.sampled_from(["padded", "unpadded", "bilinear"]),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([1, 2, WHOLE]),
)
def test_steps_are_those_of_the_windows(name: str, parts: int, more: int, fusion: int) -> None:
    layers = UNETS[name].graph()
    partition = Partition.even(92 + 4 * more, parts)
    windows = layer_windows(layers, partition, fusion)
    for index, steps in enumerate(rank_steps(layers, partition, fusion)):
        for at, step in zip(windows, steps, strict=True):
            for one, taken in zip(at.inputs, step.inputs, strict=True):
                plan = one.exchange(index)
                if plan is not None:
                    expected = plan.window.size, plan.owned.size, not plan.is_identity
                    assert (taken.window, taken.source, taken.moves) == expected
                assert taken.source <= taken.held
            if parts > 1:
                assert step.given == at.given[index].size
            assert step.given <= step.computed
        assert steps[-1].given == windows[-1].output.owned(index).size


@law
@given(st.integers(1, 5), st.sampled_from([1, 3]))
def test_kinds_count_every_rank(parts: int, fusion: int) -> None:
    layers, partition = UNETS["padded"].graph(), Partition.even(100, parts)
    found = rank_kinds(layers, partition, fusion)
    steps = rank_steps(layers, partition, fusion)
    assert sum(found.values()) == parts
    assert {kind: steps.count(kind) for kind in steps} == found
