"""What regions hold, against counts by numpy; tiles and windows that are drawn by it."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.law.cases import ArrayReader
from tiledseg.config.words import Augmentation
from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import Tile, make_tiling
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.samples.content import (
    ByContent,
    Content,
    SpatialSplit,
    SplitCut,
    count_units,
    square_units,
    tile_units,
)
from tiledseg.raster.samples.draws import Drawer
from tiledseg.raster.samples.sampling import DrawnWindows, Position, Sampler

FOOTPRINT = Footprint(4, 8, 8)
SHAPES = ((72, 56), (40, 48))
CLASSES = LabelMap.from_config(4, 255)


def labels() -> list[NDArray[np.uint8]]:
    """Class 0 in most places, none in one corner; class 1 rare, class 2 rarer, class 3 nowhere."""
    first, second = (np.zeros(shape, np.uint8) for shape in SHAPES)
    first[:40, :30] = 255
    first[60:70, 40:50] = 1
    second[4:6, 9:11] = 2
    return [first, second]


def content(asked: ByContent, side: int | None = None, grid: tuple[int, int] = (5, 4)) -> Content:
    tilings = [make_tiling(shape, grid, FOOTPRINT) for shape in SHAPES]
    units = tile_units(tilings) if side is None else square_units(SHAPES, side)
    readers = [[ArrayReader(part[None]) for part in labels()] for _ in range(2)]
    counts = count_units(units, *readers, CLASSES)
    return Content(tuple(itertools.chain.from_iterable(units)), counts, asked)


@pytest.mark.parametrize("side", [None, 5])
def test_each_region_is_counted_and_regions_cover_all(side: int | None) -> None:
    found = content(ByContent(False, 0.0), side)
    seen = [np.zeros(shape, int) for shape in SHAPES]
    for (image, box, _), counts in zip(found.regions, found.counts, strict=True):
        part_HW = labels()[image][box.slices]
        assert counts.tolist() == [int((part_HW == k).sum()) for k in range(4)]
        seen[image][box.slices] += 1
        assert side is None or max(box.shape) <= side
    assert all((part == 1).all() for part in seen)


def test_a_label_counts_where_the_image_is_valid() -> None:
    """The collar of a scene has labels, and no pixel to learn from."""

    class Collared(ArrayReader):
        def read(self, window: Box) -> tuple[NDArray[Any], NDArray[np.bool_]]:
            pixels_CHW, valid_HW = super().read(window)
            return pixels_CHW, valid_HW & (np.arange(window.col.start, window.col.stop) >= 30)

    tilings = [make_tiling(shape, (5, 4), FOOTPRINT) for shape in SHAPES]
    readers = [[kind(part[None]) for part in labels()] for kind in (Collared, ArrayReader)]
    counts = count_units(tile_units(tilings), *readers, CLASSES)
    assert counts.sum(0).tolist() == [
        int((np.concatenate([p[:, 30:].ravel() for p in labels()]) == k).sum()) for k in range(4)
    ]
    outside = [tile.core.col.stop <= 30 for tiling in tilings for tile in tiling.tiles]
    assert any(outside)
    assert not counts[outside].any()


def test_empty_tiles_are_left_out_and_the_others_come_once_an_epoch() -> None:
    found = content(ByContent(True, 0.0))
    filled = {
        (region.image, region.tile, None)
        for region, counts in zip(found.regions, found.counts, strict=True)
        if counts.any()
    }
    assert 30 < len(filled) < 40
    sampler = Sampler((20, 20), 3, 4, content=found)
    epochs = [sampler.steps(epoch) for epoch in range(2)]
    for steps in epochs:
        assert sorted(itertools.chain.from_iterable(steps)) == sorted(filled)
        assert [len(step) for step in steps] == [4] * (len(filled) // 4) + [len(filled) % 4] * (len(filled) % 4 > 0)
        assert len(steps) == sampler.steps_per_epoch
    assert epochs[0] != epochs[1]
    assert list(sampler.steps_from(Position(0, 3), 2)) == [
        (Position(epoch, i), step)
        for epoch, steps in enumerate(epochs)
        for i, step in enumerate(steps)
        if epoch or i >= 3
    ]


def test_classes_are_drawn_alike() -> None:
    """Tiles with a rare class make its third of the draws, each by its share of the class's pixels."""
    found = content(ByContent(False, 1.0))
    sampler = Sampler((20, 20), 0, 40, content=found)
    drawn = Counter(tile for epoch in range(100) for step in sampler.steps(epoch) for tile in step)
    total = sum(drawn.values())
    assert total == 100 * 40
    numbers = {(region.image, region.tile, None): i for i, region in enumerate(found.regions)}
    expected = (found.counts[:, :3] / found.counts[:, :3].sum(0)).mean(1)
    for tile, number in numbers.items():
        assert drawn[tile] / total == pytest.approx(expected[number], abs=0.02)
    half = Sampler((20, 20), 0, 40, content=content(ByContent(False, 0.5)))
    drawn = Counter(tile for epoch in range(100) for step in half.steps(epoch) for tile in step)
    for tile, number in numbers.items():
        assert drawn[tile] / total == pytest.approx((expected[number] + 1 / 40) / 2, abs=0.02)


@pytest.mark.parametrize("footprint", [None, FOOTPRINT])
@pytest.mark.parametrize("changes", [Augmentation(), Augmentation(reflect=(True, True), turn=90)])
def test_windows_are_drawn_by_class_and_not_where_nothing_is(
    changes: Augmentation, footprint: Footprint | None
) -> None:
    side, shown = 24, Counter[int]()
    drawer = Drawer(changes, SHAPES, 1)
    sampler = DrawnWindows(drawer, side, 5, 0, footprint, content(ByContent(True, 0.75), side // 3))
    steps = 100
    for number in range(steps):
        for image, tile, draw in sampler.step(Position(0, number)):
            source = draw.source if draw is not None and draw.source is not None else image
            part_HW = labels()[source]
            if draw is not None and draw.view is not None:
                rows, cols = (at.astype(int) for at in draw.view.to_raster @ np.indices(draw.view.shape).astype(float))
                part_HW = part_HW[rows, cols]
            if isinstance(tile, Tile):
                part_HW = part_HW[tile.core.slices]
            assert part_HW.shape == (side, side)
            assert (part_HW != 255).any()
            shown.update(set(part_HW.ravel().tolist()))
    # A third of three quarters for each of three classes, and those that come along.
    for k in range(3):
        assert shown[k] / (5 * steps) > 0.25 - 0.05


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiles_per_step is 39, but train.skip_empty leaves \d+ of 40 tiles"):
        Sampler((20, 20), 3, 39, content=content(ByContent(True, 0.0)))
    with pytest.raises(ConfigError, match=r"no training label is in a class"):
        Content((), np.zeros((0, 4), np.int64), ByContent(True, 0.0))


SPLIT_SHAPES = (37, 52), (40, 24), (30, 30)


def split(share: float, gap: tuple[int, int], seed: int) -> SpatialSplit:
    return SpatialSplit(tuple(SplitCut(shape, (3, 4), gap) for shape in SPLIT_SHAPES), share, seed)


@pytest.mark.parametrize(("share", "gap", "seed"), [(0.2, 3, 0), (0.5, 0, 1), (0.01, 9, 2), (0.99, 1, 3)])
def test_blocks_and_gaps(share: float, gap: int, seed: int) -> None:
    """Every pixel is validated on, or trained on where none within the gap is (Chebyshev, each dim its own)."""
    trained, validated = split(share, (gap, gap + gap // 3), seed).parts()
    blocks = 0
    for shape, ours, theirs in zip(SPLIT_SHAPES, trained, validated, strict=True):
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


def test_the_seed_draws_the_blocks_and_too_few_or_too_many_are_refused() -> None:
    drawn = [split(0.25, (2, 2), seed).parts() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ConfigError, match=r"1 block in all"):
        SpatialSplit((SplitCut((9, 9), (1, 1), (0, 0)),), 0.5, 0).parts()
    with pytest.raises(ConfigError, match=r"\[40, 2\] blocks, but an image is 37 x 52"):
        SpatialSplit(tuple(SplitCut(shape, (40, 2), (0, 0)) for shape in SPLIT_SHAPES), 0.5, 0).parts()
    with pytest.raises(ConfigError, match=r"makes 5000 x 2 blocks of an image; .* 4096 along each"):
        SpatialSplit((SplitCut((9000, 9), (5000, 2), (0, 0)),), 0.5, 0).parts()
