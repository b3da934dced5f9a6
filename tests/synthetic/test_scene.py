from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box
from tiledseg.geometry.interval import Interval
from tiledseg.synthetic import parcels
from tiledseg.synthetic import scene as scenes
from tiledseg.synthetic.classes import BUILDING, IGNORED, OPEN, ROAD, TREE, WATER
from tiledseg.synthetic.parcels import cell_kind, covering, line, make_cell, road_half_width
from tiledseg.synthetic.scene import NODATA, Scene
from tiledseg.synthetic.warp import Warp

HUGE = (10**6, 10**6)


@pytest.mark.parametrize(
    ("seed", "size", "bands", "rows", "cols", "digest"),
    [
        (0, (512, 512), 4, (0, 512), (0, 512), "c815a74868c7109f"),
        (2, (300, 700), 3, (0, 300), (0, 700), "7ae8db9201abab1a"),
        (7, (131, 257), 1, (0, 131), (0, 257), "963d11e77c52047a"),
        (4194303, HUGE, 4, (700000, 700256), (800000, 800300), "a172d807557cf326"),
        (5, HUGE, 4, (1000, 1400), (400, 700), "2bab3a384c0cef6b"),
        (11, (1, 1), 4, (0, 1), (0, 1), "b8d3371e4b910000"),
    ],
)
def test_a_seed_gives_the_bytes_that_it_always_gave(
    seed: int, size: tuple[int, int], bands: int, rows: tuple[int, int], cols: tuple[int, int], digest: str
) -> None:
    image, classes = Scene(seed, size, bands).render(Box(Interval(*rows), Interval(*cols)))
    assert hashlib.sha256(image.tobytes() + classes.tobytes()).hexdigest()[:16] == digest


def test_any_window_shows_the_same_scene() -> None:
    """The law: windows of any size, in any order, from scenes that know different cells, agree to the byte."""
    whole = Box(Interval(900, 1300), Interval(200, 700))
    image, classes = Scene(5, HUGE).render(whole)
    for height, width in ((512, 512), (133, 211)):
        scene = Scene(5, HUGE)
        for box in reversed(list(whole.blocks(height, width))):
            part_CHW, part_HW = scene.render(box)
            rows, cols = box.relative_to(whole).slices
            np.testing.assert_array_equal(part_CHW, image[:, rows, cols])
            np.testing.assert_array_equal(part_HW, classes[rows, cols])


@settings(derandomize=True, max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 2**22 - 1),
    row=st.integers(0, 10**6 - 60),
    col=st.integers(0, 10**6 - 60),
    cut=st.integers(1, 39),
)
def test_two_halves_are_the_whole_anywhere(seed: int, row: int, col: int, cut: int) -> None:
    rows, cols = Interval(row, row + 50), Interval(col, col + 40)
    whole_CHW, whole_HW = Scene(seed, HUGE).render(Box(rows, cols))
    left = Scene(seed, HUGE).render(Box(rows, Interval(col, col + cut)))
    right = Scene(seed, HUGE).render(Box(rows, Interval(col + cut, col + 40)))
    np.testing.assert_array_equal(np.concatenate([left[0], right[0]], axis=2), whole_CHW)
    np.testing.assert_array_equal(np.concatenate([left[1], right[1]], axis=1), whole_HW)


def test_seeds_differ_and_repeat() -> None:
    box = Box.of_shape((200, 200))
    first, again, other = (Scene(seed, (200, 200)).render(box)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.5


@pytest.mark.parametrize("seed", range(4))
def test_a_small_scene_holds_every_class(seed: int) -> None:
    _, classes = Scene(seed, (512, 512)).render(Box.of_shape((512, 512)))
    share = np.bincount(classes.ravel(), minlength=256) / classes.size
    assert (share[:5] > 0.005).all(), share[:5]
    assert share[:5].sum() + share[IGNORED] == pytest.approx(1)


def test_vegetation_is_bright_in_near_infrared_and_water_dark() -> None:
    image, classes = Scene(7, HUGE).render(Box.of_shape((600, 1000)))
    red, _, _, infrared = image.astype(float)
    index = (infrared - red) / (infrared + red)
    assert index[classes == TREE].mean() > 0.3
    assert index[classes == WATER].mean() < 0
    assert abs(index[classes == ROAD].mean()) < 0.1
    assert infrared[classes == WATER].mean() < 0.4 * infrared[classes == OPEN].mean()


def test_shadows_fall_away_from_the_sun() -> None:
    """Ground north-west of a building is darker than ground south-east of it."""
    image, classes = Scene(7, HUGE).render(Box.of_shape((900, 900)))
    ground, building = image[:3].mean(axis=0), classes == BUILDING

    def beside(step: int) -> float:
        rows, cols = np.nonzero(building[20:-20, 20:-20])
        rows, cols = rows + 20 + step * 4, cols + 20 + step * 3
        near = classes[rows, cols] == OPEN
        return float(ground[rows, cols][near].mean())

    assert beside(-1) < 0.8 * beside(1)


def test_nodata_corner() -> None:
    size = (300, 400)
    image, classes = Scene(3, size).render(Box.of_shape(size))
    outside = classes == IGNORED
    assert outside[-1, -1]
    assert not outside[0, 0]
    assert not outside[-1, 0]
    assert 0.005 < outside.mean() < 0.03
    assert (image[:, outside] == NODATA).all()
    assert (image[:, ~outside] != NODATA).all()


@pytest.mark.parametrize("bands", [1, 3])
def test_fewer_bands_show_the_same_scene(bands: int) -> None:
    box = Box.of_shape((200, 200))
    full, classes = Scene(1, (200, 200)).render(box)
    image, same = Scene(1, (200, 200), bands).render(box)
    np.testing.assert_array_equal(classes, same)
    if bands == 3:
        np.testing.assert_array_equal(image, full[:3])
    else:
        valid = classes != IGNORED
        assert image.shape == (1, 200, 200)
        assert np.corrcoef(image[0][valid], full.mean(axis=0)[valid])[0, 1] > 0.9


@pytest.mark.parametrize("size", [(1, 1), (1, 700), (513, 1)])
def test_tiny_scenes(size: tuple[int, int]) -> None:
    image, classes = Scene(0, size).render(Box.of_shape(size))
    assert image.shape == (4, *size)
    assert classes.shape == size


def test_forgetting_cells_bounds_the_memory_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(Interval(300, 364), Interval(300, 400))
    expected = Scene(2, HUGE).render(box)
    few = lru_cache(2)(make_cell.__wrapped__)
    monkeypatch.setattr(parcels, "make_cell", few)
    monkeypatch.setattr(scenes, "make_cell", few)
    monkeypatch.setattr(scenes, "KEPT_CELLS", 2)
    scene = Scene(2, HUGE)
    for far in (5000, 50000):
        scene.render(box.shift(far, far))
    image, classes = scene.render(box)
    np.testing.assert_array_equal(image, expected[0])
    np.testing.assert_array_equal(classes, expected[1])
    assert few.cache_info().currsize == scene._buildings_of.cache_info().currsize == 2
    assert make_cell.cache_info().maxsize == parcels.KEPT_CELLS


@pytest.mark.parametrize(
    ("seed", "size", "bands", "match"),
    [
        (0, (0, 5), 4, "size 0 x 5"),
        (0, (5, -1), 4, "size 5 x -1"),
        (0, (5, 5), 2, "2 bands"),
        (-1, (5, 5), 4, "seed -1"),
    ],
)
def test_impossible_scenes(seed: int, size: tuple[int, int], bands: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Scene(seed, size, bands)


class TestPlan:
    """The net of roads."""

    def test_parcels_cover_their_cell_once(self) -> None:
        for index in ((0, 0), (3, 1), (-2, 7), (4, 2)):
            cell = make_cell(9, *index)
            leaf = cell.leaf
            areas = ((leaf.u1 - leaf.u0) * (leaf.v1 - leaf.v0))[cell.used]
            whole = (line(9, 0, index[0] + 1) - cell.corner[0]) * (line(9, 1, index[1] + 1) - cell.corner[1])
            assert areas.sum() == pytest.approx(whole, rel=1e-5)

    def test_places_lie_in_their_parcel(self) -> None:
        rng = np.random.default_rng(0)
        u, v = rng.uniform(-700, 700, (2, 2000))
        plan = covering(9, u, v)
        places = plan.locate(u, v)
        leaf = plan.leaf
        for position, low, high in ((places.a, leaf.u0, leaf.u1), (places.b, leaf.v0, leaf.v1)):
            assert (position >= low[places.leaf]).all()
            assert (position <= high[places.leaf]).all()
        used = np.concatenate([cell.used for cell in plan.cells])
        assert used[places.leaf].all()

    def test_the_net_of_roads_is_connected(self) -> None:
        """Crossings of 12 x 12 cells that any road reaches are all reached from one another."""
        n = 12
        edges: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for i in range(n + 1):
            for j in range(n + 1):
                steps = [((i, j + 1), road_half_width(4, 0, i, j))] if j < n else []
                steps += [((i + 1, j), road_half_width(4, 1, j, i))] if i < n else []
                for end, width in steps:
                    if width > 0:
                        edges.setdefault((i, j), set()).add(end)
                        edges.setdefault(end, set()).add((i, j))
        reached, front = {(0, 0)}, [(0, 0)]
        while front:
            front = [end for start in front for end in edges[start] - reached]
            reached.update(front)
        assert reached == set(edges)
        assert len(edges) > n * n / 2

    def test_streets_of_a_village_end_on_roads(self) -> None:
        """Both sides of a village cell's streets are streets or roads; no road of its border is left out."""
        assert cell_kind(4, 0, 0) == 1
        leaf = make_cell(4, 0, 0).leaf
        for column in (leaf.u0 == 0, leaf.v0 == 0):
            assert column.any()
        assert (leaf.road_u0[leaf.u0 == 0] > 0).all()
        assert (leaf.road_v0[leaf.v0 == 0] > 0).all()
        assert (leaf.road_u1[leaf.u1 == leaf.u1.max()] > 0).all()
        assert (leaf.road_v1[leaf.v1 == leaf.v1.max()] > 0).all()

    def test_the_warp_is_undone_by_its_inverse(self) -> None:
        warp = Warp(3)
        u, v = np.random.default_rng(1).uniform(0, 50000, (2, 500))
        x, y = warp.inverse(u, v)
        again_u, again_v = warp.points(x, y)
        assert np.median(np.hypot(again_u - u, again_v - v)) < 0.01
        assert (np.hypot(again_u - u, again_v - v) < 1).mean() > 0.97

    def test_grid_and_points_feel_the_same_warp(self) -> None:
        warp = Warp(3)
        box = Box(Interval(2000, 2040), Interval(5000, 5030))
        rows, cols = np.mgrid[box.row.start : box.row.stop, box.col.start : box.col.stop]
        x, y = (cols + 0.5) * 0.5, (rows + 0.5) * 0.5
        u, v = warp.points(x.ravel(), y.ravel())
        np.testing.assert_allclose(warp.grid(box, 0).ravel(), u - x.ravel(), atol=1e-3)
        np.testing.assert_allclose(warp.grid(box, 1).ravel(), v - y.ravel(), atol=1e-3)
