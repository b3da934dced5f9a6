"""Mean and standard deviation of each band over all valid pixels, the same bits for any number of ranks.

Each rank measures its share of a fixed grid of blocks: of each block and band the count, the sum and the sum of squared
deviations from its own mean (Chan, Golub and LeVeque 1983). They are combined with math.fsum, whose result does not
depend on the order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tiledseg.errors import ConfigError, RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader

BLOCK_SHAPE = (512, 8192)  # of the fixed grid, independent of the file's blocks, so a file and its tile store agree
NO_VALID_PIXEL = "no valid pixel in any image: all are nodata, masked or NaN; check data.nodata, data.valid"
_TOO_LARGE = "holds values whose variance overflows float64; mark them as data.nodata, or scale the band"
_ROUNDING = 1e-14  # a deviation below this share of the mean is rounding of a constant floating-point band


class Region(NamedTuple):
    """A part of an image: a block of the fixed grid, a square, or the core of the tile of number `tile`."""

    image: int
    box: Box
    tile: int = -1


@dataclass(frozen=True)
class Normalization:
    """`x -> (x - mean) / std` for each band; `constant` lists the bands (from 0) of zero variance, whose std is 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    constant: tuple[int, ...] = ()

    @staticmethod
    def identity(bands: int) -> Normalization:
        return Normalization((0.0,) * bands, (1.0,) * bands)

    def warnings(self) -> tuple[str, ...]:
        if not self.constant:
            return ()
        numbers = ", ".join(str(band + 1) for band in self.constant)
        return (f"band {numbers} of the selected bands is constant over all valid pixels: only its mean is subtracted",)


def given_normalization(
    normalize: Normalization | tuple[Sequence[float], Sequence[float]] | None, bands: int
) -> Normalization:
    """Return a caller's `normalize` as a Normalization of so many bands; None: identity. Raises ConfigError."""
    if normalize is None:
        return Normalization.identity(bands)
    given = (normalize.mean, normalize.std) if isinstance(normalize, Normalization) else normalize
    try:
        mean, std = (tuple(float(value) for value in values) for values in given)
    except (TypeError, ValueError):
        raise ConfigError(f"normalize is {normalize!r}; give (means, deviations), of one number each a band") from None
    if not all(math.isfinite(value) for value in (*mean, *std)):
        raise ConfigError(f"normalize has means {list(mean)} and deviations {list(std)}; give finite numbers")
    if (len(mean), len(std)) != (bands, bands) or not all(deviation > 0 for deviation in std):
        raise ConfigError(
            f"normalize has {len(mean)} means and {len(std)} deviations for {bands} bands; give one of each a band, "
            "deviations above 0"
        )
    return normalize if isinstance(normalize, Normalization) else Normalization(mean, std)


Sums = NDArray[np.float64]
"""Sums (blocks, bands, 3): count of valid pixels, their sum, and their squared deviations from the block's mean."""


def statistics_blocks(infos: Sequence[RasterInfo], rank: int = 0, size: int = 1) -> tuple[Region, ...]:
    """Return the contiguous share of rank `rank` of `size` in the blocks of all rasters."""
    blocks = [Region(i, box) for i, info in enumerate(infos) for box in Box.of_shape(info.shape).blocks(*BLOCK_SHAPE)]
    return tuple(blocks[rank * len(blocks) // size : (rank + 1) * len(blocks) // size])


def measure(readers: Sequence[RasterReader], blocks: Iterable[Region]) -> Sums:
    """Return the sums of `blocks`, read one at a time. Raises RasterError if a sum overflows float64, and errors of
    reading."""
    parts = [np.zeros((0, readers[0].info.bands, 3))]
    for block in blocks:
        reader = readers[block.image]
        parts.append(partial_sums(*reader.read(block.box)))
        for band in np.flatnonzero(~np.isfinite(parts[-1][0]).all(1)):
            rows, cols = (f"{side.start}:{side.stop}" for side in (block.box.row, block.box.col))
            raise RasterError(f"band {band + 1} of {reader.info.path}, rows {rows}, columns {cols}, {_TOO_LARGE}")
    return np.concatenate(parts)


def partial_sums(pixels_CHW: NDArray, valid_HW: NDArray[np.bool_]) -> Sums:
    """Return the sums of one block from its pixels (C, H, W), integers or real floats, and its validity (H, W)."""
    every = bool(valid_HW.all())
    bands = []
    for band_HW in pixels_CHW:
        values = (band_HW.ravel() if every else band_HW[valid_HW]).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # `measure` refuses infinite sums, with the file's name
            total = float(values.sum())
            values -= total / max(values.size, 1)
            squares = float(np.square(values, out=values).sum())  # not np.dot: BLAS sums by thread count
        bands.append((values.size, total, squares))
    return np.array([bands], np.float64)


def finish(sums: Sums, times: int = 1) -> Normalization:
    """Return mean and population standard deviation of each band, independent of the order of blocks. A constant band
    gets std 1, so it becomes 0. A band has one mean and deviation over all joined `times`. Raises RasterError if there
    is no valid pixel."""
    if not sums[:, 0, 0].any():
        raise RasterError(NO_VALID_PIXEL)
    sums = sums.reshape(-1, sums.shape[1] // times, 3)
    moments = [_moments(band + 1, sums[:, band][sums[:, band, 0] > 0].tolist()) for band in range(sums.shape[1])]
    spread = [math.sqrt(variance) for _, variance in moments]
    constant = tuple(i for i, (mean, _) in enumerate(moments) if spread[i] <= _ROUNDING * abs(mean))
    std = tuple(1.0 if i in constant else value for i, value in enumerate(spread))
    every = tuple(time * len(std) + band for time in range(times) for band in constant)
    return Normalization(tuple(mean for mean, _ in moments) * times, std * times, every)


def check_alike(infos: Sequence[RasterInfo]) -> None:
    """Raise RasterError with both values if the images of a data set differ in band count or dtype."""
    for info in infos[1:]:
        for what, first, other in (("bands", infos[0].bands, info.bands), ("dtype", infos[0].dtype, info.dtype)):
            if first != other:
                raise RasterError(
                    f"{infos[0].path} and {info.path} differ in {what}: {first} against {other}; "
                    "give images of one kind, or select bands with data.bands"
                )


def _moments(band: int, blocks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return mean and population variance: the variance within the blocks plus that between their means."""
    try:
        count = sum(n for n, _, _ in blocks)
        mean = math.fsum(total for _, total, _ in blocks) / count
        between = (n * (total / n - mean) ** 2 for n, total, _ in blocks)
        variance = math.fsum([*between, *(within for _, _, within in blocks)]) / count
    except OverflowError:
        mean = variance = math.inf
    if not (math.isfinite(mean) and math.isfinite(variance)):
        raise RasterError(f"band {band} of the images {_TOO_LARGE}")
    return mean, variance


class Normalizer:
    """A function of pixels: (pixels - mean) / std of each band, 0 at invalid pixels, the same for every tile.

    Computed in `dtype`. If the `source` dtype has more than float32's 24 bits, computed in float64 and rounded.
    """

    def __init__(self, normalization: Normalization, source: DTypeLike, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        wide = np.dtype(source).itemsize > 2 and np.dtype(source) != np.float32
        self._working = np.dtype(np.float64) if wide else self._dtype
        self._mean_C11 = np.array(normalization.mean, self._working)[:, None, None]
        self._std_C11 = np.array(normalization.std, self._working)[:, None, None]

    def __call__(
        self,
        pixels_CHW: NDArray,
        valid_HW: NDArray[np.bool_],
        origin: tuple[int, int] = (0, 0),
        info: RasterInfo | None = None,
    ) -> NDArray:
        """Normalise a box. Raises RasterError, naming band and position, if a valid pixel becomes infinite; `origin`
        (row, col) and `info` serve its message only."""
        overflows: list[str] = []
        x_CHW = pixels_CHW.astype(self._working)
        with np.errstate(over="call", invalid="ignore", call=lambda kind, flag: overflows.append(kind)):
            if self._mean_C11.any() or (self._std_C11 != 1).any():
                x_CHW -= self._mean_C11
                x_CHW /= self._std_C11
            if not valid_HW.all():
                x_CHW[:, ~valid_HW] = 0  # nodata values such as -3e38 too
            x_CHW = x_CHW.astype(self._dtype, copy=False)
        if overflows and not np.isfinite(x_CHW).all():
            band, row, col = (int(at) for at in np.argwhere(~np.isfinite(x_CHW))[0])
            name = (
                f"band {info.band_numbers[band]} of {info.path}" if info and info.band_numbers else f"band {band + 1}"
            )
            raise RasterError(
                f"{name} at (row {origin[0] + row}, col {origin[1] + col}) is {pixels_CHW[band, row, col]}, which "
                f"{self._dtype} cannot hold once normalised; mark it as data.nodata, or scale the band"
            )
        return x_CHW
