"""Mean and standard deviation of each band over all valid pixels, the same bits for any number of ranks.

Each rank measures its share of a fixed grid of blocks; the partial sums are merged and finished. Integer rasters:
exact sums of x and x^2 as Python integers. Floating-point rasters: for each block its count, sum and sum of squared
deviations from its own mean (Chan, Golub and LeVeque 1983), combined with math.fsum, whose result does not depend on
the order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import ConfigError, RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader

BLOCK_SHAPE = (512, 8192)  # of the fixed grid; depends on nothing else, so a file and its tile store agree
_TOO_LARGE = "holds values so large that no float64 holds their variance; mark them as data.nodata, or scale the band"
_ROUNDING = 1e-14  # a spread below this share of the mean is the rounding of a constant floating-point band


class Block(NamedTuple):
    """One block of the fixed grid over image `image`."""

    image: int
    box: Box


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
    given: Normalization | tuple[Sequence[float], Sequence[float]] | None, bands: int
) -> Normalization:
    """Return the normalisation of a raster of so many bands that a caller means; None: pixels as they are."""
    if given is None:
        return Normalization.identity(bands)
    if isinstance(given, Normalization):
        return given
    try:
        mean, std = (tuple(float(value) for value in values) for values in given)
    except (TypeError, ValueError):
        raise ConfigError(f"normalize is {given!r}; give (means, deviations), of one number each a band") from None
    if not all(math.isfinite(value) for value in (*mean, *std)):
        raise ConfigError(f"normalize has means {list(mean)} and deviations {list(std)}; give finite numbers")
    if (len(mean), len(std)) != (bands, bands) or not all(deviation > 0 for deviation in std):
        raise ConfigError(
            f"normalize has {len(mean)} means and {len(std)} deviations for {bands} bands; give one of each a band, "
            "deviations above 0"
        )
    return Normalization(mean, std)


@dataclass(frozen=True)
class PartialSums:
    """What some blocks contribute, by band. Integer rasters fill `total` and `squares`, floating-point ones `blocks`:
    (count, sum, squared deviations from the block's mean) of each block."""

    count: int
    total: tuple[int, ...] = ()
    squares: tuple[int, ...] = ()
    blocks: tuple[tuple[tuple[int, float, float], ...], ...] = ()


def statistics_blocks(infos: Sequence[RasterInfo], rank: int = 0, size: int = 1) -> tuple[Block, ...]:
    """Return the contiguous share of rank `rank` of `size` in the blocks of all rasters."""
    blocks = [Block(i, box) for i, info in enumerate(infos) for box in Box.of_shape(info.shape).blocks(*BLOCK_SHAPE)]
    return tuple(blocks[rank * len(blocks) // size : (rank + 1) * len(blocks) // size])


def measure(readers: Sequence[RasterReader], blocks: Iterable[Block]) -> PartialSums:
    """Return the partial sums of `blocks`, read one at a time. Raises what reading raises, and RasterError where values
    are so large that no float64 holds a sum."""
    infos = [reader.info for reader in readers]
    check_alike(infos)
    empty = partial_sums(np.zeros((infos[0].bands, 0, 0), infos[0].dtype), np.ones((0, 0), np.bool_))
    parts = [empty]
    previous: RasterReader | None = None
    for block in blocks:
        reader = readers[block.image]
        if previous is not None and previous is not reader:
            previous.release()  # so that no more files stay open than need be
        parts.append(partial_sums(*reader.read(block.box)))
        _check_finite(parts[-1], reader.info.path, block.box)
        previous = reader
    return merge(parts)


def partial_sums(pixels_CHW: NDArray, valid_HW: NDArray[np.bool_]) -> PartialSums:
    """Return the contribution of one block, pixels (C, H, W) of an integer or real floating-point dtype, validity (H,
    W)."""
    every = bool(valid_HW.all())
    bands = [band_HW.ravel() if every else band_HW[valid_HW] for band_HW in pixels_CHW]
    count = int(np.count_nonzero(valid_HW))
    if pixels_CHW.dtype.kind == "f":
        return PartialSums(count, blocks=tuple(_float_sums(band) for band in bands))
    sums = [_integer_sums(band) for band in bands]
    return PartialSums(count, tuple(s[0] for s in sums), tuple(s[1] for s in sums))


def merge(parts: Iterable[PartialSums]) -> PartialSums:
    """Return all of `parts` together; grouping and order change nothing in what `finish` gives."""
    parts = list(parts)
    return PartialSums(
        sum(part.count for part in parts),
        tuple(map(sum, zip(*(part.total for part in parts if part.total), strict=True))),
        tuple(map(sum, zip(*(part.squares for part in parts if part.squares), strict=True))),
        tuple(
            tuple(entry for blocks in band for entry in blocks)
            for band in zip(*(part.blocks for part in parts if part.blocks), strict=True)
        ),
    )


def finish(sums: PartialSums) -> Normalization:
    """Return mean and population standard deviation of each band; a constant band gets std 1, so that it becomes 0.

    Raises RasterError where there is no valid pixel.
    """
    if sums.count == 0:
        raise RasterError("no valid pixel in any image: all are nodata, masked or NaN; check data.nodata")
    if sums.blocks:
        moments = [_finite_moments(band, blocks) for band, blocks in enumerate(sums.blocks, start=1)]
    else:
        moments = [_integer_moments(sums.count, *pair) for pair in zip(sums.total, sums.squares, strict=True)]
    spread = [math.sqrt(variance) for _, variance in moments]
    constant = tuple(i for i, (mean, _) in enumerate(moments) if spread[i] <= _ROUNDING * abs(mean))
    std = tuple(1.0 if i in constant else value for i, value in enumerate(spread))
    return Normalization(tuple(mean for mean, _ in moments), std, constant)


def check_alike(infos: Sequence[RasterInfo]) -> None:
    """Raise RasterError, showing both, where the images of one data set differ in band count or dtype."""
    for info in infos[1:]:
        for what, first, other in (("bands", infos[0].bands, info.bands), ("dtype", infos[0].dtype, info.dtype)):
            if first != other:
                raise RasterError(
                    f"{infos[0].path} and {info.path} differ in {what}: {first} against {other}; "
                    "give images of one kind, or select bands with data.bands"
                )


def _integer_sums(values: NDArray) -> tuple[int, int]:
    """Return exact sums of x and x^2.

    Each x is split into 16-bit limbs, so no sum of up to 2^31 products leaves int64.
    """
    limbs: list[NDArray[np.int64]] = []
    rest = values
    for _ in range(values.dtype.itemsize // 2 - 1):
        limbs.append((rest & 0xFFFF).astype(np.int64))
        rest = rest >> 16
    limbs.append(rest.astype(np.int64))
    total = sum(int(limb.sum()) << (16 * i) for i, limb in enumerate(limbs))
    squares = sum(int(np.dot(a, b)) << (16 * (i + j)) for i, a in enumerate(limbs) for j, b in enumerate(limbs))
    return total, squares


def _integer_moments(count: int, total: int, squares: int) -> tuple[float, float]:
    variance = Fraction(squares, count) - Fraction(total, count) ** 2
    return float(Fraction(total, count)), float(variance)


def _float_sums(values: NDArray) -> tuple[tuple[int, float, float], ...]:
    if values.size == 0:
        return ()
    wide = values.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # infinite sums are refused where the file is known
        total = float(wide.sum())
        wide -= total / wide.size
        return ((wide.size, total, float(np.square(wide, out=wide).sum())),)  # not np.dot: BLAS sums by thread count


def _check_finite(sums: PartialSums, path: str, box: Box) -> None:
    for band, blocks in enumerate(sums.blocks, start=1):
        if not all(map(math.isfinite, (number for block in blocks for number in block))):
            rows, cols = (f"{interval.start}:{interval.stop}" for interval in (box.row, box.col))
            raise RasterError(f"band {band} of {path}, rows {rows}, columns {cols}, {_TOO_LARGE}")


def _finite_moments(band: int, blocks: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    try:
        moments = _float_moments(blocks)
    except OverflowError:
        moments = math.inf, math.inf
    if not all(map(math.isfinite, moments)):
        raise RasterError(f"band {band} of the images {_TOO_LARGE}")
    return moments


def _float_moments(blocks: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Return mean and population variance: the spread within the blocks and that between their means."""
    count = sum(n for n, _, _ in blocks)
    mean = math.fsum(total for _, total, _ in blocks) / count
    between = (n * (total / n - mean) ** 2 for n, total, _ in blocks)
    return mean, math.fsum([*between, *(within for _, _, within in blocks)]) / count
