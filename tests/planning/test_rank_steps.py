"""Sizes of a rank's steps against the plan that is executed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.geometry.box import Interval
from tiledseg.geometry.sharing.decomposition import Partition, block_exchange
from tiledseg.planning.walk.rank_steps import swaps

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
        plan = block_exchange((partition, windows), None, (index, 0))
        sent, received, kept = (plan.sends, plan.receives, plan.kept) if plan else ({}, {}, None)
        for own, parts in ((swap.sent, sent), (swap.received, received)):
            assert own == tuple(row.stop - row.start for row, _ in parts.values())
        assert swap.kept == (
            partition.blocks[index].size if plan is None else kept[0][0].stop - kept[0][0].start if kept else 0
        )
