"""Who hands what to whom, against a look at every pixel."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.geometry.box import Box
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.sharing.handing_over import hand_over


@st.composite
def cuts(draw: st.DrawFn) -> tuple[dict[int, Box], dict[int, Box], tuple[int, int]]:
    """One image over ranks 3, 4, ... in two ways."""
    height, width = draw(st.integers(4, 30)), draw(st.integers(4, 30))
    rows, cols = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 2)]))

    def edges(size: int, parts: int) -> list[Interval]:
        inner = sorted(draw(st.sets(st.integers(1, size - 1), min_size=parts - 1, max_size=parts - 1)))
        return [Interval(a, b) for a, b in pairwise((0, *inner, size))]

    def one(rows: int, cols: int) -> list[Box]:
        return [Box(row, col) for row in edges(height, rows) for col in edges(width, cols)]

    first, second = one(rows, cols), one(cols, rows)
    return dict(enumerate(first, 3)), dict(enumerate(second, 3)), (height, width)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(cuts())
def test_each_pixel_comes_to_its_owner_once(cut: tuple[dict[int, Box], dict[int, Box], tuple[int, int]]) -> None:
    made, owned, shape = cut
    sides = {rank: hand_over(made, owned, rank) for rank in made}
    came = np.zeros(shape, int)
    for rank, side in sides.items():
        assert all((rank, box) in [(one.peer, one.box) for one in sides[peer].gives] for peer, box in side.takes)
        assert len({peer for peer, _ in side.gives}) == len(side.gives)
        for box in [*(box for _, box in side.takes), *([side.keeps] if side.keeps else [])]:
            assert owned[rank].contains(box)
            came[box.slices] += 1
        assert all(made[peer].contains(box) for peer, box in side.takes)
    assert (came == 1).all()
