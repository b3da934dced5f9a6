"""A synthetic satellite scene: mixed countryside and village at 0.5 m, with its labels, of any size.

Every pixel is a function of the seed and its place (the nodata corner also of the size of the scene), so any window can
be made alone, in any order, by any number of processes, and the bytes are the same. Memory depends on the window only.

Bands: red, green, blue, near infrared, uint8, nodata 0. Classes: 0 field, grass and everything else; 1 road;
2 building; 3 tree; 4 water; 255 nodata. From about 512 x 512 pixels on a scene holds every class.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box
from tiledseg.geometry.interval import Interval
from tiledseg.synthetic.buildings import PAVING_C, Buildings, joined, make_buildings, near, raise_buildings
from tiledseg.synthetic.classes import BUILDING, IGNORED, OPEN, TREE
from tiledseg.synthetic.ground import Cover, Ground, cover_of, paint_ground
from tiledseg.synthetic.light import SHADOW_PIXELS, blur, cast_shadows, light_on_slopes
from tiledseg.synthetic.noise import grid_noise, normal_CHW
from tiledseg.synthetic.parcels import KEPT_CELLS, Places, SitePlan, covering, make_cell
from tiledseg.synthetic.trees import MAX_RADIUS, Trees, find_trees, raise_trees
from tiledseg.synthetic.warp import METRES, Warp

NODATA = 0
BANDS = {1: ("panchromatic",), 3: ("red", "green", "blue"), 4: ("red", "green", "blue", "near infrared")}
MAX_SEED = 2**22 - 1

_PANCHROMATIC = np.array((0.30, 0.32, 0.18, 0.20), np.float32)
_SKY_C = np.array((0.30, 0.34, 0.42, 0.26), np.float32)
"""Share of the light that comes from the sky, by band."""
_HAZE_C = np.array((4.0, 6.0, 11.0, 2.0), np.float32)
_NOISE_C = np.array((1.6, 1.5, 1.8, 2.0), np.float32)
"""Standard deviation of the sensor's noise, grey levels, in the dark."""
_CORNER = (0.20, 0.13)
"""Extent of the nodata corner, lower right, as shares of height and width."""
_STRIP = 64
"""Rows painted at once: arrays of a strip stay in the processor's cache."""
_BEYOND = 160.0
"""Metres of plan around a window in which an object that is seen or casts its shadow there may have its parcel: up to
48 m away along x and y, in a plan stretched by up to 1.94 and sheared by up to 0.94, and some to spare."""


class _Objects(NamedTuple):
    """What stands on a window and around it: `box` is the window and as far towards the sun as shadows come from."""

    box: Box
    buildings: Buildings
    trees: Trees
    height_HW: NDArray[np.float32]
    paved_HW: NDArray[np.bool_]
    building_HW: NDArray[np.int16]
    tree_HW: NDArray[np.int32]


class Scene:
    """The scene of a seed: `render` gives any window of it."""

    def __init__(self, seed: int, size: tuple[int, int], bands: int = 4) -> None:
        if min(size) < 1:
            raise ConfigError(
                f"size {size[0]} x {size[1]}: a scene has at least 1 x 1 pixels; give --size HEIGHT WIDTH"
            )
        if bands not in BANDS:
            raise ConfigError(f"{bands} bands: a scene has 1 (panchromatic), 3 (RGB) or 4 (RGB and near infrared)")
        if not 0 <= seed <= MAX_SEED:
            raise ConfigError(f"seed {seed}: give 0 to {MAX_SEED}")
        self.seed, self.size, self.bands = seed, size, bands
        self._key = seed * 1000  # noises take their own numbers from here on
        self._warp = Warp(self._key)
        self._buildings_of = lru_cache(KEPT_CELLS)(self._build)

    def render(self, box: Box) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Image (bands, H, W) and classes (H, W) of the pixels of `box`, uint8."""
        valid = self.valid(box)
        image = np.full((self.bands, *box.shape), NODATA, np.uint8)
        classes = np.full(box.shape, IGNORED, np.uint8)
        if not valid.any():
            return image, classes
        plan = self._plan(box)
        cover, objects = cover_of(plan), self._objects(plan, box)
        for start in range(box.row.start, box.row.stop, _STRIP):
            strip = Box(Interval(start, min(start + _STRIP, box.row.stop)), box.col)
            rows = strip.relative_to(box).row.slice
            light_CHW, class_HW = self._light(plan, cover, objects, _grown(strip, 1, 1))
            image[:, rows] = self._sense(light_CHW, strip)
            classes[rows] = class_HW[1:-1, 1:-1]
        image[:, ~valid] = NODATA
        classes[~valid] = IGNORED
        return image, classes

    def valid(self, box: Box) -> NDArray[np.bool_]:
        """False in the nodata corner, which the swath did not cover."""
        (height, width), (tall, wide) = self.size, _CORNER
        below = (height - 0.5 - np.arange(box.row.start, box.row.stop)) / (tall * height)
        right = (width - 0.5 - np.arange(box.col.start, box.col.stop)) / (wide * width)
        return below[:, None] + right >= 1

    def _plan(self, box: Box) -> SitePlan:
        """The plan under `box` and well around it: from samples, as the warp is smooth."""
        y, x = (np.linspace(side.start, side.stop, side.size // 64 + 2) * METRES for side in (box.row, box.col))
        u, v = self._warp.points(np.tile(x, y.size), np.repeat(y, x.size))
        u, v = (np.array([part.min() - _BEYOND, part.max() + _BEYOND]) for part in (u, v))
        return covering(self._key, u, v)

    def _objects(self, plan: SitePlan, box: Box) -> _Objects:
        lit = _grown(box, 2, SHADOW_PIXELS + 2)
        around = _grown(lit, *[int(MAX_RADIUS * 1.2 / METRES) + 2] * 2)
        buildings = near(joined([self._buildings_of(cell.i, cell.j) for cell in plan.cells]), around)
        trees = find_trees(self._key, self._warp, buildings, around)
        height_HW, paved_HW = np.zeros(lit.shape, np.float32), np.zeros(lit.shape, bool)
        building_HW = raise_buildings(buildings, lit, height_HW, paved_HW)
        tree_HW = raise_trees(trees, lit, grid_noise(self._key + 121, lit, 3), height_HW)
        return _Objects(lit, buildings, trees, height_HW, paved_HW, building_HW, tree_HW)

    def _build(self, i: int, j: int) -> Buildings:
        return make_buildings(self._key, self._warp, make_cell(self._key, i, j))

    def _light(
        self, plan: SitePlan, cover: Cover, objects: _Objects, box: Box
    ) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Light from the ground (4, H, W) and classes of `box`, before the sensor."""
        places, stretch = self._places(plan, box)
        fine = grid_noise(self._key + 120, box, 2)
        ground = paint_ground(self._key, plan, cover, places, stretch, fine, box)
        _cover(ground, objects, fine, box)
        rows, cols = _grown(box, 1, SHADOW_PIXELS + 1).relative_to(objects.box).slices
        height = objects.height_HW[rows, cols]
        sun = (1 - cast_shadows(height, box.shape)) * light_on_slopes(height, box.shape)
        light = ground.colour_CHW
        for band in range(4):
            light[band] *= _SKY_C[band] + (1 - _SKY_C[band]) * sun
        return light, ground.class_HW

    def _places(self, plan: SitePlan, box: Box) -> tuple[Places, tuple[NDArray, NDArray]]:
        """Where the pixels of `box` lie in the plan, and how much the plan is stretched there along u and v."""
        y = ((np.arange(box.row.start, box.row.stop) + 0.5) * METRES)[:, None]
        x = (np.arange(box.col.start, box.col.stop) + 0.5) * METRES
        plane: list[NDArray] = []
        stretch: list[NDArray] = []
        for axis, position in enumerate((x, y)):
            warp = self._warp.grid(_grown(box, 1, 1), axis)
            # Central differences over two pixels, which are one metre.
            by_x = (warp[1:-1, 2:] - warp[1:-1, :-2]) + np.float32(axis == 0)
            by_y = (warp[2:, 1:-1] - warp[:-2, 1:-1]) + np.float32(axis == 1)
            stretch.append(np.sqrt(by_x * by_x + by_y * by_y))
            plane.append(position + warp[1:-1, 1:-1])
        return plan.locate(*plane), (stretch[0], stretch[1])

    def _sense(self, light_CHW: NDArray[np.float32], box: Box) -> NDArray[np.uint8]:
        """Grey levels 1 ... 255: lens, uneven light, haze, a square-root stretch and noise."""
        uneven = 1 + np.float32(0.07) * grid_noise(self._key + 130, box, 3000)
        uneven += np.float32(0.02) * grid_noise(self._key + 131, box, 500)
        grey = blur(light_CHW)
        grey *= uneven * np.float32(1 / 0.62)
        np.sqrt(grey, out=grey)
        grey *= np.float32(244)
        grey += _HAZE_C[:, None, None]
        if self.bands == 1:
            red, green, blue, infrared = (share * band for share, band in zip(_PANCHROMATIC, grey, strict=True))
            grey = (red + green + blue + infrared)[None]
        grey = grey[: self.bands]
        deviation = grey * np.float32(0.012) + _NOISE_C[: self.bands, None, None]
        grey += normal_CHW(self._key + 132, box)[: self.bands] * deviation
        return np.clip(np.rint(grey, out=grey), 1, 255, out=grey).astype(np.uint8)


def _grown(box: Box, before: int, after: int) -> Box:
    return Box(box.row.expand(before, after), box.col.expand(before, after))


def _cover(ground: Ground, objects: _Objects, fine_HW: NDArray[np.float32], box: Box) -> None:
    """Paint what stands on the ground of `box` over it."""
    rows, cols = box.relative_to(objects.box).slices
    paved, building, tree = (of[rows, cols].ravel() for of in (objects.paved_HW, objects.building_HW, objects.tree_HW))
    colour, classes, fine = ground.colour_CHW.reshape(4, -1), ground.class_HW.reshape(-1), fine_HW.ravel()
    yard = np.flatnonzero(paved & (classes == OPEN))
    colour[:, yard] = PAVING_C[:, None] * (1 + np.float32(0.06) * fine[yard])
    roof = np.flatnonzero((building >= 0) & (tree < 0))
    colour[:, roof] = objects.buildings.colour_C[building[roof]].T * (1 + np.float32(0.06) * fine[roof])
    classes[roof] = BUILDING
    crown = np.flatnonzero(tree >= 0)
    colour[:, crown] = objects.trees.colour_C[tree[crown]].T * (1 + np.float32(0.14) * fine[crown])
    classes[crown] = TREE
