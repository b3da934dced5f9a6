from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.geometry.halo import Footprint, paper_efficiency, paper_efficiency_linear
from tiledseg.geometry.tiling import make_tiling, tiling_efficiency


def test_the_papers_optimum() -> None:
    assert round(paper_efficiency((10000, 10000), (8, 8), 92), 4) == 1.3161
    assert paper_efficiency((10000, 10000), (8, 8), 92) == (1434 / 1250) ** 2
    assert round(paper_efficiency_linear((10000, 10000), (8, 8), 92), 4) == 1.2944


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 200))
def test_the_linear_form_is_the_first_order_of_the_exact_one(grid: int, halo: int) -> None:
    size = 10000
    linear = paper_efficiency_linear((size, size), (grid, grid), halo)
    second_order = (2 * halo * grid / size) ** 2
    assert paper_efficiency((size, size), (grid, grid), halo) == pytest.approx(linear + second_order)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3), st.integers(100, 400), st.integers(100, 400))
def test_efficiency_counts_context_pixels_over_the_raster(rows: int, cols: int, halo: int, h: int, w: int) -> None:
    tiling = make_tiling((h, w), (rows, cols), Footprint(1, 8 * halo, 8 * halo))
    computed = sum(t.context.height * t.context.width for t in tiling.tiles)
    assert tiling_efficiency(tiling) == computed / (h * w)
    assert tiling_efficiency(tiling) >= 1


def test_one_tile_of_a_padded_network_costs_nothing_extra() -> None:
    assert tiling_efficiency(make_tiling((160, 320), (1, 1), Footprint(16, 96, 96))) == 1
