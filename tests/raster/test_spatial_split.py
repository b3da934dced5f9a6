"""Which pixels a split trains and validates on, against a look at every pixel."""

from __future__ import annotations

import numpy as np
import pytest

from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.samples.content import SpatialSplit, SplitCut

SHAPES = (37, 52), (40, 24), (30, 30)


def split(share: float, gap: tuple[int, int], seed: int) -> SpatialSplit:
    return SpatialSplit(tuple(SplitCut(shape, (3, 4), gap) for shape in SHAPES), share, seed)


@pytest.mark.parametrize(("share", "gap", "seed"), [(0.2, 3, 0), (0.5, 0, 1), (0.01, 9, 2), (0.99, 1, 3)])
def test_blocks_and_gaps(share: float, gap: int, seed: int) -> None:
    """Every pixel is validated on, or trained on where none within the gap is (Chebyshev, each dim its own)."""
    trained, validated = split(share, (gap, gap + gap // 3), seed).parts()
    blocks = 0
    for shape, ours, theirs in zip(SHAPES, trained, validated, strict=True):
        whole = Box.of_shape(shape)
        held_out_HW, trained_HW = theirs.inside(whole), ours.inside(whole)
        for row, col in np.ndindex(shape):
            beside = gap + gap // 3
            near = held_out_HW[max(row - gap, 0) : row + gap + 1, max(col - beside, 0) : col + beside + 1]
            assert trained_HW[row, col] == (not near.any())
        rows, cols = (np.arange(parts + 1) * size // parts for size, parts in zip(shape, (3, 4), strict=True))
        found = [held_out_HW[a:b, c:d] for a, b in zip(rows, rows[1:]) for c, d in zip(cols, cols[1:])]  # noqa: B905, RUF007
        assert all(part.all() or not part.any() for part in found)
        blocks += sum(bool(part.all()) for part in found)
        part = Box(Interval(7, 29), Interval(3, 22))
        np.testing.assert_array_equal(ours.inside(part), trained_HW[part.slices])
        np.testing.assert_array_equal(theirs.inside(part), held_out_HW[part.slices])
    assert blocks == min(max(round(share * 36), 1), 35)


def test_the_seed_draws_the_blocks() -> None:
    drawn = {seed: split(0.25, (2, 2), seed).parts() for seed in (0, 1)}
    assert drawn[0] == split(0.25, (2, 2), 0).parts()
    assert drawn[0] != drawn[1]


def test_too_few_blocks_and_too_many() -> None:
    with pytest.raises(ConfigError, match=r"1 block in all"):
        SpatialSplit((SplitCut((9, 9), (1, 1), (0, 0)),), 0.5, 0).parts()
    with pytest.raises(ConfigError, match=r"\[40, 2\] blocks, but an image is 37 x 52"):
        SpatialSplit(tuple(SplitCut(shape, (40, 2), (0, 0)) for shape in SHAPES), 0.5, 0).parts()
    with pytest.raises(ConfigError, match=r"makes 5000 x 2 blocks of an image; .* 4096 along each"):
        SpatialSplit((SplitCut((9000, 9), (5000, 2), (0, 0)),), 0.5, 0).parts()
