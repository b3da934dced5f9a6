"""A synthetic satellite scene: mixed countryside and village at 0.5 m, with its labels, of any size.

Every pixel is a function of the seed and its place (the nodata corner also of the size of the scene). So any window can
be made alone, in any order, by any number of threads, and the bytes are the same. Memory depends on the window only.

Bands: red, green, blue, near infrared, uint8, nodata 0. Classes: 0 field, grass and everything else; 1 road;
2 building; 3 tree; 4 water; 255 nodata. From about 512 x 512 pixels on a scene holds every class.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box, Interval
from tiledseg.synthetic import land
from tiledseg.synthetic.land import (
    LOT,
    MEADOW,
    METRES,
    POND,
    WOOD,
    BuildingSite,
    Plan,
    grid_noise,
    normal_CHW,
    uniform,
    wave,
)

MAX_HEIGHT = 18.0

_GRID = 5.0
_CELL = int(_GRID / METRES)  # pixels

_CROWNS_C = np.array(
    [
        (0.050, 0.085, 0.040, 0.44),
        (0.060, 0.100, 0.042, 0.50),
        (0.078, 0.112, 0.045, 0.47),
        (0.036, 0.062, 0.036, 0.30),
        (0.105, 0.115, 0.050, 0.43),
    ],
    np.float32,
)
"""Reflectance of crowns in red, green, blue and near infrared; the fourth is a conifer's."""


class Trees(NamedTuple):
    """The trees of some grid cells: columns of shape (rows, cols), an entry a cell. Metres."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    radius: NDArray[np.float64]  # 0 where there is no tree
    height: NDArray[np.float64]
    colour_C: NDArray[np.float32]


def grown_to_cells(box: Box) -> Box:
    """Return the grid cells under `box` and their neighbours, of which a tree may reach into it."""
    rows, cols = (
        Interval((side.start // _CELL - 1) * _CELL, ((side.stop - 1) // _CELL + 2) * _CELL)
        for side in (box.row, box.col)
    )
    return Box(rows, cols)


def plant(seed: int, box: Box, plan: Plan, site: BuildingSite, clump_HW: NDArray[np.float32]) -> Trees:
    """Plant trees in the grid cells of `box`, by what lies at their trunks. `clump_HW` is noise in [-1, 1]."""
    row = np.arange(box.row.start // _CELL, box.row.stop // _CELL)[:, None]
    col = np.arange(box.col.start // _CELL, box.col.stop // _CELL)[None, :]

    def random(number: int) -> NDArray[np.float64]:
        return uniform(seed, number, row, col).astype(np.float64)

    y, x = (row + 0.12 + 0.76 * random(80)) * _GRID, (col + 0.12 + 0.76 * random(81)) * _GRID
    trunk = (y / METRES).astype(np.int64) - box.row.start, (x / METRES).astype(np.int64) - box.col.start
    border, road, depth, clump = site.border[trunk], site.road[trunk], site.depth[trunk], clump_HW[trunk]
    use, bits = plan.parcels.use[site.parcel[trunk]], plan.parcels.bits[site.parcel[trunk]]
    woods = (use == WOOD) & (border > wood_edge(clump))
    density = np.select(
        [woods, use == LOT, use == MEADOW, use == POND],
        [0.97, np.where(border < 3.5, 0.30, 0.12), 0.006 + 0.10 * (clump > 0.45), 0.10 + 0.25 * (clump > 0.1)],
        0.0012,
    )
    density = np.where((use != LOT) & (bits % 4 < 2) & (border < 2.0), 0.3 + 0.5 * (clump > -0.1), density)  # hedges
    density = np.where((depth > -9) & ~woods, 0.06 + 0.55 * (clump > 0.0), density)
    density = np.where((road > -1.8) | (depth > -0.8) | (site.height[trunk] > 0), 0.0, density)
    spread = random(83)
    radius = np.where(woods, 2.3 + 1.5 * spread, 1.4 + 2.4 * spread * spread)
    height = np.where(woods, 8.0, 2.0) + radius * 1.6 + 2.0 * random(86)
    tone = (0.82 + 0.36 * random(85))[..., None].astype(np.float32)
    colour = _CROWNS_C[(random(84) * len(_CROWNS_C)).astype(np.int64)] * tone
    return Trees(x, y, np.where(random(82) < density, radius, 0.0), height, colour)


def wood_edge(clump: NDArray) -> NDArray:
    """Return how far from its parcel's border a wood begins, metres: 0.5 to 12, uneven. `clump` is noise in [-1, 1]."""
    return np.maximum(4.0 + 8.0 * clump, 0.5)


def crowns(trees: Trees, box: Box, rough_HW: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Return the height of the highest crown over each pixel (0 for none), and its colour (4, H, W), inside the outer
    cells of `box`. `rough_HW` in [-1, 1] makes the crowns' edges and tops uneven."""
    row, col = np.arange(box.row.start, box.row.stop), np.arange(box.col.start, box.col.stop)
    top_HW, tree_HW = np.zeros(box.shape), np.zeros(box.shape, np.int64)
    for down, right in itertools.product((-1, 0, 1), repeat=2):
        cell_row = np.clip(np.arange(box.height) // _CELL + down, 0, trees.x.shape[0] - 1)[:, None]
        cell_col = np.clip(np.arange(box.width) // _CELL + right, 0, trees.x.shape[1] - 1)
        at = cell_row, cell_col
        radius = trees.radius[at]
        dy, dx = ((row + 0.5) * METRES)[:, None] - trees.y[at], (col + 0.5) * METRES - trees.x[at]
        ratio = (dy * dy + dx * dx) / np.maximum(radius * radius, 1e-6)
        top = trees.height[at] * (1 - 0.42 * ratio) + 0.7 * rough_HW
        higher = (ratio < 1.0 + 0.4 * rough_HW) & (top > top_HW)
        top_HW[higher] = top[higher]
        tree_HW[higher] = (cell_row * trees.x.shape[1] + cell_col)[higher]
    return top_HW, np.moveaxis(trees.colour_C.reshape(-1, 4)[tree_HW], -1, 0)


NODATA = 0
BANDS = {1: ("panchromatic",), 3: ("red", "green", "blue"), 4: ("red", "green", "blue", "near infrared")}
MAX_SEED = 2**22 - 1

_SKY_C = np.array((0.30, 0.34, 0.42, 0.26), np.float32)
"""Share of the light that comes from the sky, by band."""
_HAZE_C = np.array((4.0, 6.0, 11.0, 2.0), np.float32)
_NOISE_C = np.array((1.6, 1.5, 1.8, 2.0), np.float32)
"""Standard deviation of the sensor's noise, grey levels, in the dark."""
_CORNER = (0.20, 0.13)
"""Extent of the nodata corner, lower right, as shares of height and width."""

_SHADE = (-0.8, -0.6)
"""Direction of shadows (row, col), unit vector: the sun stands in the south-east."""
_TANGENT = 1.25
"""Tangent of the sun's elevation, 51 degrees."""
_SHADOW_PIXELS = int(MAX_HEIGHT / _TANGENT / land.METRES) + 1
"""No shadow is longer."""

_FLOOR_C, _ASPHALT_C, _BANK_C, _MUD_C, _WATER_C = np.array(
    [
        (0.048, 0.068, 0.036, 0.30),
        (0.128, 0.126, 0.124, 0.140),
        (0.150, 0.145, 0.085, 0.33),
        (0.085, 0.095, 0.070, 0.060),
        (0.030, 0.050, 0.052, 0.022),
    ],
    np.float32,
)
"""Reflectance in red, green, blue and near infrared."""


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

    def render(self, box: Box) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the image (bands, H, W) and the classes (H, W) of the pixels of `box`, uint8."""
        valid_HW = self.valid(box)
        image_CHW = np.full((self.bands, *box.shape), NODATA, np.uint8)
        class_HW = np.full(box.shape, land.IGNORED, np.uint8)
        if valid_HW.any():
            lit = Box(box.row.expand(1, _SHADOW_PIXELS + 1), box.col.expand(1, _SHADOW_PIXELS + 1))
            colour_CHW, height_HW, all_HW = self._surface(lit)
            rows, cols = box.relative_to(lit).slices
            sun_HW = (1 - cast_shadows(height_HW, box.shape)) * light_on_slopes(height_HW, box.shape)
            sky = _SKY_C[:, None, None]
            light_CHW = colour_CHW[:, rows, cols] * (sky + (1 - sky) * sun_HW)
            image_CHW[:, valid_HW] = self._sense(light_CHW, box)[:, valid_HW]
            class_HW[valid_HW] = all_HW[rows, cols][valid_HW]
        return image_CHW, class_HW

    def valid(self, box: Box) -> NDArray[np.bool_]:
        """Return False in the nodata corner, which the swath did not cover."""
        (height, width), (tall, wide) = self.size, _CORNER
        below = (height - 0.5 - np.arange(box.row.start, box.row.stop)) / (tall * height)
        right = (width - 0.5 - np.arange(box.col.start, box.col.stop)) / (wide * width)
        return below[:, None] + right >= 1

    def _surface(self, lit: Box) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint8]]:
        """Return the reflectance (4, H, W), the height in metres (H, W) and the classes (H, W) of `lit`."""
        box = grown_to_cells(lit)
        noise = land.noise_of(self._key, box)
        u, v = land.bend(self._key, box)
        plan = land.plan_of(self._key, u, v)
        site, clump_HW, fine_HW = land.survey(plan, noise, u, v), noise(90, 60), noise(120, 2)
        trees = plant(self._key, box, plan, site, clump_HW)
        crown_HW, crown_CHW = crowns(trees, box, noise(121, 3))
        colour_CHW = _open_land(plan, site, noise, fine_HW)
        class_HW = np.zeros(box.shape, np.uint8)

        def paint(where_HW: NDArray[np.bool_], number: int, colour_CP: NDArray, rough: float) -> None:
            colour_CHW[:, where_HW] = colour_CP * (1 + np.float32(rough) * fine_HW[where_HW])
            class_HW[where_HW] = number

        floor_HW = (plan.parcels.use[site.parcel] == land.WOOD) & (site.border > wood_edge(clump_HW) + 2.0)
        paint(floor_HW, land.TREE, _FLOOR_C[:, None], 0.15)
        water_HW = site.depth > 0
        clear = np.minimum(site.depth[water_HW] / 5, 1).astype(np.float32)
        paint(water_HW, land.WATER, _MUD_C[:, None] + (_WATER_C - _MUD_C)[:, None] * clear, 0.05)
        paint(site.road > 0, land.ROAD, _ASPHALT_C[:, None], 0.10)
        roof_HW, covered_HW = site.height > 0, crown_HW > site.height
        paint(roof_HW, land.BUILDING, plan.parcels.roof_C[site.parcel[roof_HW]].T, 0.06)
        paint(covered_HW, land.TREE, crown_CHW[:, covered_HW], 0.14)
        height_HW = np.maximum(crown_HW, site.height).astype(np.float32)
        rows, cols = lit.relative_to(box).slices
        return colour_CHW[:, rows, cols], height_HW[rows, cols], class_HW[rows, cols]

    def _sense(self, light_CHW: NDArray[np.float32], box: Box) -> NDArray[np.uint8]:
        """Return grey levels 1 ... 255: uneven light, haze, a square-root stretch and noise."""
        uneven_HW = 1 + np.float32(0.07) * grid_noise(self._key + 130, box, 3000)
        grey_CHW = np.sqrt(light_CHW * (uneven_HW * np.float32(1 / 0.62))) * np.float32(244)
        grey_CHW += _HAZE_C[:, None, None]
        if self.bands == 1:
            red, green, blue, infrared = grey_CHW
            grey_CHW = (red * 0.3 + green * 0.3 + blue * 0.2 + infrared * 0.2)[None]
        grey_CHW = grey_CHW[: self.bands]
        deviation_CHW = grey_CHW * np.float32(0.012) + _NOISE_C[: self.bands, None, None]
        grey_CHW = grey_CHW + normal_CHW(self._key + 132, box)[: self.bands] * deviation_CHW
        return np.clip(np.rint(grey_CHW), 1, 255).astype(np.uint8)


def _open_land(
    plan: land.Plan, site: land.BuildingSite, noise: land.Noise, fine_HW: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the reflectance of fields with their rows, meadows, lawns and banks."""
    use, bits = plan.parcels.use[site.parcel], plan.parcels.bits[site.parcel]
    across = np.where(bits & 1, site.a, site.b)
    rows = wave(across / (1.8 + 0.15 * ((bits >> np.uint32(8)) % 16)))
    tracks = wave(across / 16) > 0.93  # of the tractor
    tone = (0.10 * noise(104, 130) + 0.06 * noise(105, 23) + 0.07 * fine_HW).astype(np.float32)
    tone += np.where(use == land.FIELD, np.where(tracks, -0.2, 0.07 * rows), 0).astype(np.float32)
    # Patches are drier or lusher plants: brighter in the visible, darker in near infrared.
    weights = np.array([1, 1, 1, -0.45], np.float32)[:, None, None]
    colour_CHW = np.moveaxis(plan.parcels.colour_C[site.parcel], -1, 0) * (1 + weights * tone)
    bank = (np.clip(1 + site.depth / 3, 0, 1) * 0.8).astype(np.float32)
    return colour_CHW + (_BANK_C[:, None, None] - colour_CHW) * bank


def cast_shadows(height_HW: NDArray[np.float32], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Return the shadow in 0 ... 1 on the pixels of `shape` that begin at (1, 1) of `height_HW` (metres).

    The ray from a pixel to the sun is followed pixel by pixel; it is blocked where something stands higher.
    """
    rows, cols = shape
    highest_HW = np.zeros(shape, np.float32)
    for k in range(1, _SHADOW_PIXELS):
        row, col = 1 + round(-k * _SHADE[0]), 1 + round(-k * _SHADE[1])
        step_HW = height_HW[row : row + rows, col : col + cols] - np.float32(k * land.METRES * _TANGENT)
        np.maximum(highest_HW, step_HW, out=highest_HW)
    return np.clip((highest_HW - height_HW[1 : 1 + rows, 1 : 1 + cols]) / np.float32(0.8), 0, 1)


def light_on_slopes(height_HW: NDArray[np.float32], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Return the sunlight on the same pixels relative to flat ground, by Lambert's law; 1 on the ground itself."""
    rows, cols = shape
    by_row = np.clip(height_HW[2 : 2 + rows, 1 : 1 + cols] - height_HW[:rows, 1 : 1 + cols], -1.1, 1.1)
    by_col = np.clip(height_HW[1 : 1 + rows, 2 : 2 + cols] - height_HW[1 : 1 + rows, :cols], -1.1, 1.1)
    toward = 1 + (by_row * np.float32(_SHADE[0]) + by_col * np.float32(_SHADE[1])) / np.float32(_TANGENT)
    light = np.maximum(toward, np.float32(0.12)) / np.sqrt(1 + by_row * by_row + by_col * by_col)
    return np.where(height_HW[1 : 1 + rows, 1 : 1 + cols] > 0.4, light, np.float32(1))
