"""A synthetic satellite scene: countryside and village at 0.5 m, with its labels, of any size.

Roads run along a net of lines 80 m apart, bent by smooth noise. Between them lie parcels of 40 m: fields, meadows,
woods, ponds, and lots with houses. Streams follow a contour of noise, trees stand on a jittered grid of 5 m.

Every pixel is a function of the seed and its position (the nodata corner also of the scene's size). So windows can be
rendered alone, in any order, by any number of threads, with the same bytes. Random numbers are stateless: hashes and
smooth noise of a seed and a position. Only operations that IEEE 754 rounds alike on any machine are used: additions,
multiplications, divisions, square roots and comparisons; no BLAS, no library sine.

Bands: red, green, blue, near infrared, uint8, nodata 0. Classes: 0 field, grass and everything else; 1 road;
2 building; 3 tree; 4 water; 255 nodata. From about 256 x 256 pixels on a scene holds every class.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from affine import Affine
from numpy.typing import ArrayLike, NDArray
from rasterio.crs import CRS

from tiledseg.config.checks import checked
from tiledseg.config.words import BLOCK
from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.map_writer import RasterLayout, pack_layout, publish, raster_output, raster_writer
from tiledseg.raster.mirrored_reader import prefetch
from tiledseg.raster.samples.draws import mixed
from tiledseg.system.outputs import check_outputs, unfinished

FIELD, ROAD, BUILDING, TREE, WATER = range(5)
CLASSES = ("field", "road", "building", "tree", "water")
CLASS_COLOURS = ((158, 188, 94), (70, 70, 74), (196, 64, 50), (24, 104, 44), (44, 110, 196))
IGNORED, NODATA = 255, 0
BANDS = {1: ("panchromatic",), 3: ("red", "green", "blue"), 4: ("red", "green", "blue", "near infrared")}
MAX_SEED = 2**22 - 1
METRES = 0.5
"""Side of a pixel, metres."""

_BLOCK, _PARCEL, _LOT, _TREE = 80.0, 40.0, 20.0, 5.0
"""Metres between roads, and sides in metres of a parcel, of a lot with a house, and of a tree's cell."""
_CROP, _MEADOW, _WOOD, _POND, _VILLAGE = range(5)
_SHARES = np.array([0.38, 0.50, 0.64, 0.72])
"""Cumulative shares of parcels with crop, meadow, wood and pond; the rest is village."""
_AT_ORIGIN = np.array([[_VILLAGE, _WOOD], [_POND, _VILLAGE]])  # parcels of the origin: a small scene has all classes

_GROUNDS_C = np.array(
    [
        (0.080, 0.125, 0.055, 0.42),  # crops
        (0.170, 0.175, 0.090, 0.36),
        (0.310, 0.265, 0.160, 0.38),  # stubble
        (0.205, 0.155, 0.110, 0.25),  # soil
        (0.290, 0.285, 0.060, 0.47),  # rape
        (0.110, 0.145, 0.070, 0.42),  # grass
    ],
    np.float32,
)
_CROWN_C = np.array((0.062, 0.098, 0.043, 0.46), np.float32)
_ASPHALT_C = np.array((0.128, 0.126, 0.124, 0.140), np.float32)
_WATER_C = np.array((0.030, 0.050, 0.052, 0.022), np.float32)
_MUD_C = np.array((0.085, 0.095, 0.070, 0.060), np.float32)
_ROOFS_C = np.array(
    [(0.36, 0.19, 0.125, 0.4), (0.29, 0.165, 0.12, 0.33), (0.24, 0.12, 0.085, 0.28), (0.56, 0.56, 0.55, 0.55)],
    np.float32,
)
_GRASS = len(_GROUNDS_C) - 1
"""Reflectance in red, green, blue and near infrared; `_GRASS` is the last of the grounds."""

_SKY_C = np.array((0.30, 0.34, 0.42, 0.26), np.float32)
"""Share of skylight, by band."""
_HAZE_C = np.array((4.0, 6.0, 11.0, 2.0), np.float32)
_NOISE_C = np.array((1.6, 1.5, 1.8, 2.0), np.float32)
"""Standard deviation of the sensor's noise in the dark, in grey levels."""
_CORNER = (0.20, 0.13)
"""Extent of the nodata corner, lower right, as shares of height and width."""
_SHADE = (0.8, 0.6)
"""Direction of the sun (row, col), a unit vector: south-east, 51 degrees high."""
_TANGENT = 1.25
_SHADOW_PIXELS = 22  # length of the shadow of the highest tree, 13 m
WINDOW = (BLOCK, BLOCK)
"""Window that a thread renders at a time: one block of the file."""

_CRS, _TRANSFORM = "EPSG:32632", Affine(METRES, 0.0, 480000.0, 0.0, -METRES, 5420000.0)
_MAX_SIDE = 2_000_000
_MAX_WORKERS = 256


def hash32(seed: int, *keys: ArrayLike) -> NDArray[np.uint32]:
    """Return 32 well-mixed bits for each combination of integer keys (broadcast together)."""
    bits = mixed(np.array([seed & 0xFFFFFFFF], np.uint32))
    for key in keys:
        word = np.atleast_1d(np.asarray(key)).astype(np.int64).astype(np.uint32)
        bits = mixed(bits ^ (word * np.uint32(0x9E3779B1) + np.uint32(0x7F4A7C15)))
    return bits


def uniform(seed: int, *keys: ArrayLike) -> NDArray[np.float32]:
    """Return a uniform number in [0, 1), float32, for each combination of keys."""
    return (hash32(seed, *keys) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def _positions(box: Box) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.arange(box.row.start, box.row.stop), np.arange(box.col.start, box.col.stop)


def grid_noise(seed: int, box: Box, period: int) -> NDArray[np.float32]:
    """Return smooth value noise in [-1, 1] at every pixel of `box`, with one random value every `period` pixels."""
    rows, cols = _positions(box)
    i, j = rows // period, cols // period
    shares = ((at % period).astype(np.float32) / np.float32(period) for at in (rows, cols))
    by_row, by_col = (t * t * t * (t * (t * 6 - 15) + 10) for t in shares)  # Perlin's quintic
    lattice = uniform(seed, np.arange(i[0], i[-1] + 2)[:, None], np.arange(j[0], j[-1] + 2)) * np.float32(
        2
    ) - np.float32(1)
    lines = lattice[:, j - j[0]]
    lines = lines + (lattice[:, j - j[0] + 1] - lines) * by_col
    return lines[i - i[0]] + (lines[1:] - lines[:-1])[i - i[0]] * by_row[:, None]


class Scene:
    """The scene of a seed, of which `render` returns any window."""

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
        self._key = seed * 1000  # each kind of noise adds its own number

    def render(self, box: Box) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the image (bands, H, W) and the classes (H, W) of the pixels of `box`, uint8."""
        valid_HW = self._valid(box)
        lit = Box(box.row.expand(0, _SHADOW_PIXELS), box.col.expand(0, _SHADOW_PIXELS))
        colour_CHW, height_HW, class_HW = self._surface(lit)
        here = box.relative_to(lit).slices
        sun_HW = 1 - _shadows(height_HW, box.shape)
        sky_CHW = _SKY_C[:, None, None]
        image_CHW = self._sense(colour_CHW[:, *here] * (sky_CHW + (1 - sky_CHW) * sun_HW), box)
        return np.where(valid_HW, image_CHW, np.uint8(NODATA)), np.where(valid_HW, class_HW[here], np.uint8(IGNORED))

    def _valid(self, box: Box) -> NDArray[np.bool_]:
        """Return a mask that is False in the nodata corner, outside the swath."""
        below, right = (
            (size - 0.5 - at) / (share * size)
            for size, share, at in zip(self.size, _CORNER, _positions(box), strict=True)
        )
        return below[:, None] + right >= 1

    def _bent(self, box: Box) -> list[NDArray]:
        """Return the positions (v, u), in metres, of the pixels of `box` on the plan with straight roads."""
        origin = Box(Interval(0, 1), Interval(0, 1))  # not bent; slopes are at most 0.5, so the map does not fold
        rows, cols = _positions(box)
        return [
            (at + 0.5) * METRES + 24.0 * (grid_noise(key, box, 360) - grid_noise(key, origin, 360))
            for at, key in ((rows[:, None], self._key + 1), (cols, self._key + 2))
        ]

    def _surface(self, box: Box) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint8]]:
        """Return the reflectance (4, H, W), the height in metres (H, W) and the classes (H, W)."""
        places = self._bent(box)
        numbers = [np.floor(at / _PARCEL).astype(np.int64) for at in places]
        in_parcel = [at - number * _PARCEL for at, number in zip(places, numbers, strict=True)]
        border_HW = np.minimum(*(np.minimum(at, _PARCEL - at) for at in in_parcel))
        road_HW = 2.6 - np.minimum(*(np.abs(at - _BLOCK * np.floor(at / _BLOCK + 0.5)) for at in places))
        bits_HW = hash32(self._key + 3, *numbers)
        kind_HW = np.searchsorted(_SHARES, (bits_HW & np.uint32(0xFFFF)).astype(np.float32) * np.float32(2.0**-16))
        first_HW = (np.abs(2 * numbers[0] - 1) == 1) & (np.abs(2 * numbers[1] - 1) == 1)
        kind_HW = np.where(first_HW, _AT_ORIGIN[numbers[0] & 1, numbers[1] & 1], kind_HW)
        rough_HW, fine_HW = grid_noise(self._key + 4, box, 24), grid_noise(self._key + 5, box, 3)

        aside = [at / (_PARCEL / 2) - 1 for at in in_parcel]
        pond_HW = 0.75 + 0.15 * rough_HW - np.sqrt(aside[0] * aside[0] + aside[1] * aside[1])
        stream_HW = 0.035 - np.abs(grid_noise(self._key + 6, box, 700))
        water_HW = ((kind_HW == _POND) & (pond_HW > 0)) | ((stream_HW > 0) & ~first_HW)
        roof_HW, roof_CHW = self._houses(places, (kind_HW == _VILLAGE) & ~water_HW & (stream_HW < -0.02))
        density_HW = np.choose(kind_HW, [0.002, 0.05, 0.95, 0.4, 0.25]) + 0.4 * ((border_HW < 1.5) & (kind_HW == _CROP))
        density_HW = np.where((road_HW > -1) | water_HW | (roof_HW > 0), 0, density_HW)
        crown_HW, tone_HW = self._crowns(box, density_HW)

        tone = bits_HW >> np.uint32(16)
        across_HW = np.where(tone & np.uint32(1), in_parcel[0], in_parcel[1]) / 2.4
        rows_HW = np.where(kind_HW == _CROP, np.abs(across_HW - np.floor(across_HW) - 0.5), 0.25)
        ground_HW = np.where(kind_HW == _CROP, (tone >> np.uint32(1)) % _GRASS, _GRASS)
        bright_HW = 0.85 + (tone >> np.uint32(8)).astype(np.float32) * np.float32(0.3 / 256)
        bright_HW = bright_HW + 0.10 * rough_HW + 0.06 * fine_HW + 0.3 * (rows_HW - 0.25)
        colour_CHW = np.moveaxis(_GROUNDS_C[ground_HW], -1, 0) * bright_HW.astype(np.float32)
        class_HW = np.zeros(box.shape, np.uint8)
        clear_HW = np.clip(4 * np.maximum(pond_HW, 10 * stream_HW), 0, 1)
        layers = (
            ((kind_HW == _WOOD) & (border_HW > 4 + 3 * rough_HW), TREE, 0.7 * _CROWN_C[:, None, None], 0.15),
            (water_HW, WATER, _MUD_C[:, None, None] + (_WATER_C - _MUD_C)[:, None, None] * clear_HW, 0.05),
            (roof_HW > 0, BUILDING, roof_CHW, 0.06),
            (road_HW > 0, ROAD, _ASPHALT_C[:, None, None], 0.10),
            (crown_HW > 0, TREE, _CROWN_C[:, None, None] * tone_HW, 0.14),
        )
        for where_HW, number, layer_CHW, rough in layers:
            colour_CHW = np.where(where_HW, layer_CHW * (1 + rough * fine_HW), colour_CHW)
            class_HW[where_HW] = number
        return colour_CHW.astype(np.float32), np.maximum(crown_HW, roof_HW).astype(np.float32), class_HW

    def _houses(self, places: list[NDArray], where_HW: NDArray[np.bool_]) -> tuple[NDArray, NDArray]:
        """Return the height of the roof over each pixel (0: none), and its colour. Most lots have a house."""
        lots = [np.floor(at / _LOT).astype(np.int64) for at in places]
        bits_HW = hash32(self._key + 7, *lots)
        parts = [(bits_HW >> np.uint32(shift) & np.uint32(15)).astype(np.float64) / 15 for shift in (0, 4, 8, 12)]
        off = [at - lot * _LOT - 8.5 - 3 * part for at, lot, part in zip(places, lots, parts[:2], strict=True)]
        inward = [4 + 2.5 * part - np.abs(at) for at, part in zip(off, parts[2:], strict=True)]
        house_HW = where_HW & (np.minimum(*inward) > 0) & (bits_HW >> np.uint32(24) & np.uint32(15) > 0)
        sunny_HW = np.where(off[0] > 0, 1.12, 0.88)  # brightness of the roof's two sides
        roof_CHW = np.moveaxis(_ROOFS_C[bits_HW >> np.uint32(30)], -1, 0) * sunny_HW
        return np.where(house_HW, 4 + 0.7 * inward[0], 0), roof_CHW

    def _crowns(self, box: Box, density_HW: NDArray) -> tuple[NDArray, NDArray]:
        """Return the height of the highest crown over each pixel (0: none), and its brightness. `density_HW`: share of
        cells with a tree."""
        side = int(_TREE / METRES)
        rows, cols = _positions(box)
        i, j = rows // side, cols // side
        cells = np.arange(i[0] - 1, i[-1] + 2)[:, None], np.arange(j[0] - 1, j[-1] + 2)
        down, right, spread, chance, tone = (
            uniform(self._key + 10 + number, *cells).astype(np.float64) for number in range(5)
        )
        radius = 2.5 + 4.5 * spread  # pixels
        top_HW, tone_HW = np.zeros(box.shape), np.ones(box.shape)
        for by_row, by_col in itertools.product(range(3), repeat=2):
            at = (i - i[0] + by_row)[:, None], j - j[0] + by_col
            dy = (rows + 0.5)[:, None] - (cells[0][at[0], 0] + down[at]) * side
            dx = cols + 0.5 - (cells[1][at[1]] + right[at]) * side
            ratio = (dy * dy + dx * dx) / (radius[at] * radius[at])
            top = (3 + 1.3 * radius[at]) * (1 - 0.4 * ratio)
            higher = (ratio < 1) & (chance[at] < density_HW) & (top > top_HW)
            top_HW, tone_HW = np.where(higher, top, top_HW), np.where(higher, 0.75 + 0.5 * tone[at], tone_HW)
        return top_HW, tone_HW

    def _sense(self, light_CHW: NDArray, box: Box) -> NDArray[np.uint8]:
        """Return grey levels 1 ... 255, with haze, a square-root stretch, and noise from sums of four bytes."""
        grey_CHW = (
            np.sqrt(light_CHW.astype(np.float32) * np.float32(1 / 0.62)) * np.float32(244) + _HAZE_C[:, None, None]
        )
        if self.bands == 1:
            red, green, blue, infrared = grey_CHW
            grey_CHW = (red * 0.3 + green * 0.3 + blue * 0.2 + infrared * 0.2)[None]
        grey_CHW = grey_CHW[: self.bands]
        rows, cols = _positions(box)
        bits_CHW = np.stack([hash32(self._key + 20 + band, rows[:, None], cols) for band in range(self.bands)])
        sums_CHW = bits_CHW.view(np.uint8).reshape(*bits_CHW.shape, 4).sum(-1, dtype=np.int32)
        deviation_CHW = grey_CHW * np.float32(0.012) + _NOISE_C[: self.bands, None, None]
        grey_CHW = grey_CHW + (sums_CHW - 510).astype(np.float32) * np.float32(1 / 147.8) * deviation_CHW
        return np.clip(np.rint(grey_CHW), 1, 255).astype(np.uint8)


def _shadows(height_HW: NDArray[np.float32], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Return the shadow, 0 ... 1, on the first pixels, of `shape`, of `height_HW` (metres), by following each pixel's
    ray to the sun: it is blocked where the surface is higher."""
    highest_HW = np.zeros(shape, np.float32)
    for k in range(1, _SHADOW_PIXELS):
        row, col = round(k * _SHADE[0]), round(k * _SHADE[1])
        ahead_HW = height_HW[row : row + shape[0], col : col + shape[1]]
        highest_HW = np.maximum(highest_HW, ahead_HW - np.float32(k * METRES * _TANGENT))
    return np.clip((highest_HW - height_HW[: shape[0], : shape[1]]) / np.float32(0.8), 0, 1)


@checked
def write_scene(
    image: str | Path,
    labels: str | Path,
    size: tuple[int, int],
    bands: int = 4,
    seed: int = 0,
    workers: int = 1,
) -> None:
    """Write the scene of `seed`: `image` (uint8, nodata 0) and `labels` (uint8, nodata 255), size (height, width).

    The bytes depend on seed, size, bands and GDAL's compressors, not on `workers` (threads). Existing files are
    replaced once both new ones are whole. Raises ConfigError for arguments out of range, OutputError or WriteError if a
    file cannot be written.
    """
    if max(size) > _MAX_SIDE or not 1 <= workers <= _MAX_WORKERS:
        raise ConfigError(
            f"size {size[0]} x {size[1]}, workers {workers}; give sides to {_MAX_SIDE}, workers from 1 to "
            f"{_MAX_WORKERS}"
        )
    scene = Scene(seed, size, bands)
    info = RasterInfo("the scene", *size, bands, "uint8", CRS.from_string(_CRS), _TRANSFORM)
    legend = [ClassRecord(name, colour) for name, colour in zip(CLASSES, CLASS_COLOURS, strict=True)]
    outputs = [raster_output("--image", image, info, bands, "uint8")]
    check_outputs([*outputs, raster_output("--labels", labels, info, 1, "uint8", legend=True)])
    with unfinished(image) as first, unfinished(labels) as second:
        layouts = (
            RasterLayout(first, info, bands, "uint8", NODATA, (), BANDS[bands]),
            RasterLayout(second, info, 1, "uint8", IGNORED, legend),
        )
        with raster_writer(layouts[0]) as write_image, raster_writer(layouts[1]) as write_labels:

            def write(box: Box) -> None:
                image_CHW, class_HW = scene.render(box)
                write_image(box, image_CHW)
                write_labels(box, class_HW[None])

            for _ in prefetch(Box.of_shape(size).blocks(*WINDOW), write, workers, 2 * workers):
                pass
        for layout in layouts:
            pack_layout(layout, workers)
        for layout in layouts:
            publish(layout)
