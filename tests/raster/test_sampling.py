"""Steps of tiles and windows by seed, epoch and step alone, and those that are drawn by what regions hold."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.law.cases import ArrayReader
from tiledseg.config.words import Augmentation
from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import Tile, largest_window, make_tiling
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.samples.content import ByContent, Content, count_units, split_images, square_units, tile_units
from tiledseg.raster.samples.draws import Drawer
from tiledseg.raster.samples.sampling import DrawnWindows, Position, Sampler, TileReference

counts = st.lists(st.integers(1, 12), min_size=1, max_size=8).map(tuple)
law = settings(derandomize=True, max_examples=100, deadline=None)


@law
@given(counts, st.integers(0, 2**40), st.integers(0, 50), st.data())
def test_every_tile_occurs_once_an_epoch(
    tiles_per_image: tuple[int, ...], seed: int, epoch: int, data: st.DataObject
) -> None:
    number = data.draw(st.none() | st.integers(1, sum(tiles_per_image)))
    sampler = Sampler(tuple(map(range, tiles_per_image)), seed, number)
    steps = list(sampler.steps(epoch))
    every = Counter(TileReference(i, t) for i, n in enumerate(tiles_per_image) for t in range(n))
    assert Counter(tile for step in steps for tile in step) == every
    assert len(steps) == sampler.steps_per_epoch
    if number is None:
        assert all({tile.image for tile in step} == {step[0].image} for step in steps)
    else:
        assert [len(step) for step in steps[:-1]] == [number] * (len(steps) - 1)
        assert 1 <= len(steps[-1]) <= number


def test_the_order_is_the_documented_one() -> None:
    """A change here breaks the resuming of every run: it must be on purpose."""
    assert [step[0].image for step in Sampler((range(1),) * 8, seed=0).steps(0)] == [4, 2, 5, 0, 6, 7, 1, 3]


@law
@given(counts, st.integers(0, 99), st.integers(0, 40))
def test_resuming_goes_on_where_the_run_stood(tiles_per_image: tuple[int, ...], seed: int, cut: int) -> None:
    sampler = Sampler(tuple(map(range, tiles_per_image)), seed, 1)
    whole = list(sampler.steps_from(Position(0, 0), epochs=2))
    assert [position for position, _ in whole] == sorted(position for position, _ in whole)
    at = cut % len(whole)
    assert list(sampler.steps_from(whole[at][0], epochs=2)) == whole[at:]
    assert list(sampler.steps_from(Position(0, sampler.steps_per_epoch), epochs=2)) == whole[len(whole) // 2 :]


SHAPES = ((60, 75), (40, 30))
FOURS, TWENTIES = (range(4),) * 2, (range(20),) * 2
FOOTPRINTS = {"clipped": Footprint(8, 16, 16), "mirrored": Footprint(8, 11, 13, 10, mirror=True)}


def windows(footprint: Footprint | None, augmentation: Augmentation | None = None, seed: int = 0) -> DrawnWindows:
    return DrawnWindows(Drawer(augmentation or Augmentation(), SHAPES, 3), 20, 7, seed, footprint)


@pytest.mark.parametrize("name", FOOTPRINTS)
def test_a_window_with_its_halo_is_a_tile_of_its_raster(name: str) -> None:
    """Of one of whole alignments; `tests/law/test_draws.py` has the pixels of its context."""
    sampler = windows(FOOTPRINTS[name])
    starts = set()
    for step in range(300):
        for image, tile, draw in sampler.step(Position(0, step)):
            assert isinstance(tile, Tile)
            assert draw is None
            starts.add((image, tile.core.row.start, tile.core.col.start))
            for core, side in zip((tile.core.row, tile.core.col), SHAPES[image], strict=True):
                assert core.stop == min(core.start + 20, side)
    # Every multiple of 8 from 0 to the one whose window ends at the border or beyond it.
    expected = [
        set(itertools.product((i,), range(0, h - 12, 8), range(0, w - 12, 8))) for i, (h, w) in enumerate(SHAPES)
    ]
    assert starts == set.union(*expected)


def test_each_pixel_of_a_small_window_is_as_likely_and_images_go_by_their_share() -> None:
    sampler = windows(None)
    references = [sampler.step(Position(0, step)) for step in range(1000)]
    assert {tuple(r.image for r in step) for step in references} == {tuple(range(7))}
    assert {r.tile for step in references for r in step} == {0}
    draws = [r.draw for step in references for r in step if r.draw]
    areas = [height * width for height, width in SHAPES]
    assert np.mean([draw.source == 0 for draw in draws]) == pytest.approx(areas[0] / sum(areas), abs=0.03)
    rows = np.array([draw.view.to_raster.c for draw in draws if draw.view and draw.source == 1])
    counts = np.bincount(rows.astype(int), minlength=21)
    assert counts.size == 21
    assert counts.min() > 0.6 * counts.mean()


def test_an_epoch_covers_the_pixels_once_and_steps_come_from_any_position() -> None:
    sampler = windows(FOOTPRINTS["clipped"])
    assert sampler.steps_per_epoch == -(-(60 * 75 + 40 * 30) // (7 * 400)) == 3
    everything = list(sampler.steps_from(Position(0, 0), 3))
    assert [at for at, _ in everything] == list(itertools.starmap(Position, itertools.product(range(3), range(3))))
    assert list(sampler.steps_from(Position(1, 2), 3)) == everything[5:]
    assert len({step for _, step in everything}) == 9
    assert everything != list(windows(FOOTPRINTS["clipped"], seed=1).steps_from(Position(0, 0), 3))


@pytest.mark.parametrize("footprint", [FOOTPRINTS["clipped"], None], ids=["exact", "small"])
def test_a_window_is_rotated_about_its_middle(footprint: Footprint | None) -> None:
    """So it shows what it shows without a rotation, and none is turned out of its image."""
    plain = windows(footprint, Augmentation(turn=90, scale=(0.7, 1.3)))
    rotated = windows(footprint, Augmentation(turn=90, scale=(0.7, 1.3), rotate=180))
    angles = set()
    for step in range(20):
        for before, after in zip(plain.step(Position(0, step)), rotated.step(Position(0, step)), strict=True):
            assert (before.image, before.tile) == (after.image, after.tile)
            middles = []
            for tile, draw in ((before.tile, before.draw), (after.tile, after.draw)):
                assert draw is not None
                assert draw.view is not None
                row, col = (tile.core.row.start, tile.core.col.start) if isinstance(tile, Tile) else (0, 0)
                rows, cols = draw.view.places(Box(Interval(row, row + 20), Interval(col, col + 20)))
                middles.append((rows.mean(), cols.mean()))
                angles.add(round(np.arctan2(draw.view.to_raster.d, draw.view.to_raster.a), 9))
            assert middles[1] == pytest.approx(middles[0], abs=1e-9)
    assert len(angles) > 20 * 7


def test_no_window_of_a_raster_has_a_larger_context_than_is_planned_for() -> None:
    with pytest.raises(ConfigError, match=r"train.windows: size is 31, but an image has 30 px .*; give at most 30"):
        DrawnWindows(Drawer(Augmentation(), SHAPES, 3), 31, 1, 0, None)
    for name, footprint in FOOTPRINTS.items():
        planned = [make_tiling(largest_window(shape, 20, footprint), (1, 1), footprint).context_max for shape in SHAPES]
        found = [(0, 0), (0, 0)]
        for step in range(300):
            for image, tile, _ in windows(footprint).step(Position(0, step)):
                assert isinstance(tile, Tile)
                found[image] = tuple(map(max, found[image], tile.context.shape))  # type: ignore[assignment]
        assert found == planned, name


def test_tiles_of_an_image_share_a_draw_unless_each_has_its_own() -> None:
    drawer = Drawer(Augmentation(brightness=1.0), SHAPES, 3)
    image, tile = (
        [dict.fromkeys(r.draw for r in step) for _, step in Sampler(FOURS, 0, drawer=drawer, each=each).steps_from(
            Position(0, 0), 2
        )]
        for each in ("image", "tile")
    )  # fmt: skip
    assert [len(draws) for draws in image] == [1] * 4
    assert [len(draws) for draws in tile] == [4] * 4
    assert len(set().union(*image)) == 4
    assert len(set().union(*tile)) == 16
    plain = Sampler(FOURS, 0, drawer=Drawer(Augmentation(), SHAPES, 3))
    assert list(plain.steps_from(Position(0, 0), 2)) == list(Sampler(FOURS, 0).steps_from(Position(0, 0), 2))


CLIPPED = Footprint(4, 8, 8)
SCENES = ((72, 56), (40, 48))
COLLAR = 17
CLASSES = LabelMap.from_config(4, 255)


def labels() -> list[NDArray[np.uint8]]:
    """Class 0 in most places, none in one corner; class 1 rare, class 2 rarer, class 3 nowhere."""
    first, second = (np.zeros(shape, np.uint8) for shape in SCENES)
    first[:40, :30] = 255
    first[60:70, 40:50] = 1
    second[4:6, 9:11] = 2
    return [first, second]


class Collared(ArrayReader):
    """An image with a collar, whose labels are no pixels to learn from."""

    def read(self, window: Box) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        pixels_CHW, valid_HW = super().read(window)
        return pixels_CHW, valid_HW & (np.arange(window.col.start, window.col.stop) >= COLLAR)


def content(asked: ByContent, side: int | None = None, image: type[ArrayReader] = ArrayReader) -> Content:
    tilings = [make_tiling(shape, (5, 4), CLIPPED) for shape in SCENES]
    units = tile_units(tilings) if side is None else square_units(SCENES, side)
    images, truth = ([kind(part[None]) for part in labels()] for kind in (image, ArrayReader))
    counts = count_units(units, images, truth, CLASSES)
    return Content(tuple(itertools.chain.from_iterable(units)), counts, asked)


@pytest.mark.parametrize("side", [None, 5])
def test_each_region_is_counted_where_its_image_is_valid_and_regions_cover_all(side: int | None) -> None:
    found = content(ByContent(False, 0.0), side, Collared)
    seen = [np.zeros(shape, int) for shape in SCENES]
    for (image, box, _), counts in zip(found.regions, found.counts, strict=True):
        part_HW = np.where(np.arange(SCENES[image][1]) < COLLAR, 255, labels()[image])[box.slices]
        assert counts.tolist() == [int((part_HW == k).sum()) for k in range(4)]
        seen[image][box.slices] += 1
        assert side is None or max(box.shape) <= side
    assert all((part == 1).all() for part in seen)


def test_empty_tiles_are_left_out_and_the_others_come_once_an_epoch() -> None:
    found = content(ByContent(True, 0.0))
    filled = {
        (region.image, region.tile, None)
        for region, counts in zip(found.regions, found.counts, strict=True)
        if counts.any()
    }
    assert 30 < len(filled) < 40
    sampler = Sampler(TWENTIES, 3, 4, content=found)
    epochs = [list(sampler.steps(epoch)) for epoch in range(2)]
    for steps in epochs:
        assert sorted(itertools.chain.from_iterable(steps)) == sorted(filled)
        assert [len(step) for step in steps] == [4] * (len(filled) // 4) + [len(filled) % 4] * (len(filled) % 4 > 0)
        assert len(steps) == sampler.steps_per_epoch
    assert epochs[0] != epochs[1]
    resumed = [(Position(0, at), epochs[0][at]) for at in range(3, len(epochs[0]))]
    resumed += [(Position(1, at), step) for at, step in enumerate(epochs[1])]
    assert list(sampler.steps_from(Position(0, 3), 2)) == resumed


def test_a_draw_that_moves_pixels_takes_the_tile_that_shows_those_drawn_by_class() -> None:
    changes = Augmentation(reflect=(True, True), turn=90)
    tilings = [make_tiling(shape, (5, 4), CLIPPED) for shape in SCENES]
    tilings += [make_tiling(shape[::-1], (4, 5), CLIPPED) for shape in SCENES]
    by_class = Sampler(TWENTIES, 3, 4, content=content(ByContent(True, 0.5)), tilings=tuple(tilings))
    moved = replace(by_class, drawer=Drawer(changes, SCENES, 1), each="tile", turned=(0, 1))
    assert moved.units() == tile_units(tilings[:2])
    numbers = []
    for plain, drawn in zip(*(itertools.chain(*sampler.steps(0)) for sampler in (by_class, moved)), strict=True):
        core = tilings[plain.image].tiles[plain.tile].core
        middle = ((core.row.start + core.row.stop - 1) / 2, (core.col.start + core.col.stop - 1) / 2)
        place = drawn.draw.view.find(*middle) if drawn.draw and drawn.draw.view else middle
        shown = tilings[drawn.image].tiles[drawn.tile].core
        for at, side in zip(place, (shown.row, shown.col), strict=True):
            assert side.start - 0.5 <= at <= side.stop - 0.5
        numbers.append((drawn.image, drawn.tile != plain.tile))
    assert {image for image, _ in numbers} == {0, 1, 2, 3}
    assert sum(other for _, other in numbers) > len(numbers) / 2


def test_classes_are_drawn_alike() -> None:
    """Tiles with a rare class make its third of the draws, each by its share of the class's pixels."""
    found = content(ByContent(False, 1.0))
    sampler = Sampler(TWENTIES, 0, 40, content=found)
    drawn = Counter(tile for epoch in range(100) for step in sampler.steps(epoch) for tile in step)
    total = sum(drawn.values())
    assert total == 100 * 40
    numbers = {(region.image, region.tile, None): i for i, region in enumerate(found.regions)}
    expected = (found.counts[:, :3] / found.counts[:, :3].sum(0)).mean(1)
    for tile, number in numbers.items():
        assert drawn[tile] / total == pytest.approx(expected[number], abs=0.02)
    half = Sampler(TWENTIES, 0, 40, content=content(ByContent(False, 0.5)))
    drawn = Counter(tile for epoch in range(100) for step in half.steps(epoch) for tile in step)
    for tile, number in numbers.items():
        assert drawn[tile] / total == pytest.approx((expected[number] + 1 / 40) / 2, abs=0.02)


@pytest.mark.parametrize("footprint", [None, CLIPPED])
@pytest.mark.parametrize("changes", [Augmentation(), Augmentation(reflect=(True, True), turn=90)])
def test_windows_are_drawn_by_class_and_not_where_nothing_is(
    changes: Augmentation, footprint: Footprint | None
) -> None:
    side, shown = 24, Counter[int]()
    drawer = Drawer(changes, SCENES, 1)
    sampler = DrawnWindows(drawer, side, 5, 0, footprint, content=content(ByContent(True, 0.75), side // 3))
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


def test_too_few_to_draw_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiles_per_step is 9.* have 8 tiles"):
        Sampler(FOURS, seed=0, tiles_per_step=9)
    with pytest.raises(ConfigError, match=r"tiles_per_step is 39, but train.skip_empty leaves \d+ of 40 tiles"):
        Sampler(TWENTIES, 3, 39, content=content(ByContent(True, 0.0)))
    with pytest.raises(ConfigError, match=r"no training label is in a class"):
        Content((), np.zeros((0, 4), np.int64), ByContent(True, 0.0))


SPLIT_SHAPES = (37, 52), (40, 24), (30, 30)


def split(share: float, gap: int, seed: int) -> tuple[Any, Any]:
    return split_images(SPLIT_SHAPES, (3, 4), gap, share, seed)


@pytest.mark.parametrize(("share", "gap", "seed"), [(0.2, 3, 0), (0.5, 0, 1), (0.01, 9, 2), (0.99, 1, 3)])
def test_blocks_and_gaps(share: float, gap: int, seed: int) -> None:
    """Every pixel is validated on, or trained on where none within the gap is (Chebyshev)."""
    trained, validated = split(share, gap, seed)
    blocks = 0
    for shape, ours, theirs in zip(SPLIT_SHAPES, trained, validated, strict=True):
        whole = Box.of_shape(shape)
        held_out_HW, trained_HW = theirs.inside(whole), ours.inside(whole)
        for row, col in np.ndindex(shape):
            near = held_out_HW[max(row - gap, 0) : row + gap + 1, max(col - gap, 0) : col + gap + 1]
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
    drawn = [split(0.25, 2, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ConfigError, match=r"1 block in all"):
        split_images([(9, 9)], (1, 1), 0, 0.5, 0)
    with pytest.raises(ConfigError, match=r"\[40, 2\] blocks, but an image is 37 x 52"):
        split_images(SPLIT_SHAPES, (40, 2), 0, 0.5, 0)
    with pytest.raises(ConfigError, match=r"makes 5000 x 2 blocks of an image; .* 4096 along each"):
        split_images([(9000, 9)], (5000, 2), 0, 0.5, 0)
    _, theirs = split_images([(14, 30)], 10, 0, 0.4, 0)  # blocks of about 10 pixels
    assert [box.shape for part in theirs for box in part.boxes] == [(14, 10)]
