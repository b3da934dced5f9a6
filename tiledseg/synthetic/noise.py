"""Random numbers without a state: hashes and smooth noise that are functions of a seed and a place.

Only additions, multiplications, divisions, square roots and comparisons, which IEEE 754 rounds in one way: the same
place gives the same bits in any block, on any machine. No BLAS and no library sine, which may not.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiledseg.geometry.box import Box


def hash32(seed: int, *keys: ArrayLike) -> NDArray[np.uint32]:
    """32 well-mixed bits for each combination of integer keys (broadcast together; scalars give shape (1,)).

    Each key is folded in by the finaliser "lowbias32" (xor-shifts and two multiplications modulo 2^32).
    """
    mixed = _mix(np.array([seed & 0xFFFFFFFF], np.uint32))
    for key in keys:
        bits = np.atleast_1d(np.asarray(key)).astype(np.int64).astype(np.uint32)
        mixed = _mix(mixed ^ (bits * np.uint32(0x9E3779B1) + np.uint32(0x7F4A7C15)))
    return mixed


def _mix(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    bits = bits ^ (bits >> np.uint32(16))
    bits *= np.uint32(0x7FEB352D)
    bits ^= bits >> np.uint32(15)
    bits *= np.uint32(0x846CA68B)
    bits ^= bits >> np.uint32(16)
    return bits


def uniform(seed: int, *keys: ArrayLike) -> NDArray[np.float32]:
    """Uniform in [0, 1), float32, for each combination of keys."""
    return (hash32(seed, *keys) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def pick(seed: int, *keys: int) -> float:
    return float(uniform(seed, *keys)[0])


_QUANTILES = np.array([round(NormalDist().inv_cdf((k + 0.5) / 256), 3) for k in range(256)], np.float32)


def normal_CHW(seed: int, box: Box) -> NDArray[np.float32]:
    """Four standard normal values (256 levels each) for every pixel of `box`, shape (4, H, W)."""
    rows, cols = np.arange(box.row.start, box.row.stop), np.arange(box.col.start, box.col.stop)
    bits = hash32(seed, rows[:, None], cols[None, :]).astype("<u4", copy=False)
    levels = bits.view(np.uint8).reshape(*box.shape, 4)
    return np.moveaxis(_QUANTILES.take(levels), -1, 0)


def _smooth(t: NDArray) -> NDArray:
    """Perlin's quintic 6t^5 - 15t^4 + 10t^3: first and second derivative 0 at both ends."""
    return t * t * t * (t * (t * 6 - 15) + 10)


def _along(start: int, stop: int, period: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    index = np.arange(start, stop)
    return index // period, _smooth((index % period).astype(np.float32) / np.float32(period))


def grid_noise(seed: int, box: Box, period: int) -> NDArray[np.float32]:
    """Smooth value noise in [-1, 1] at every pixel of `box`, with one random value every `period` pixels."""
    row_cells, row_weights = _along(box.row.start, box.row.stop, period)
    col_cells, col_weights = _along(box.col.start, box.col.stop, period)
    first_row, first_col = int(row_cells[0]), int(col_cells[0])
    lattice = _lattice(seed, np.arange(first_row, row_cells[-1] + 2)[:, None], np.arange(first_col, col_cells[-1] + 2))
    at = col_cells - first_col
    lines = lattice[:, at] + (lattice[:, at + 1] - lattice[:, at]) * col_weights
    steps = lines[1:] - lines[:-1]
    if period <= 8:
        at = row_cells - first_row
        return lines[at] + steps[at] * row_weights[:, None]
    noise = np.empty(box.shape, np.float32)
    for cell in range(first_row, int(row_cells[-1]) + 1):
        part = slice(*np.searchsorted(row_cells, [cell, cell + 1]))
        np.multiply(steps[cell - first_row], row_weights[part, None], out=noise[part])
        noise[part] += lines[cell - first_row]
    return noise


def point_noise(seed: int, rows: NDArray, cols: NDArray, period: int) -> NDArray[np.float64]:
    """The noise of `grid_noise` at scattered places (pixels, fractional)."""
    row_cells, col_cells = np.floor(rows / period), np.floor(cols / period)
    row_weights, col_weights = _smooth(rows / period - row_cells), _smooth(cols / period - col_cells)
    i, j = row_cells.astype(np.int64), col_cells.astype(np.int64)
    lines = np.stack([i, i + 1])
    left, right = _lattice(seed, lines, np.stack([j, j])), _lattice(seed, lines, np.stack([j + 1, j + 1]))
    upper, lower = left + (right - left) * col_weights
    return upper + (lower - upper) * row_weights


def line_noise(seed: int, position: NDArray[np.float64], period: float) -> NDArray[np.float32]:
    """Smooth noise in [-1, 1] along one dim, at any positions (float64, any shape)."""
    scaled = position / period
    cells = np.floor(scaled)
    weights = _smooth((scaled - cells).astype(np.float32))
    cells = cells.astype(np.int64)
    first = int(cells.min()) if cells.size else 0
    last = int(cells.max()) if cells.size else 0
    lattice = _lattice(seed, np.arange(first, last + 2), 0)
    cells -= first
    low = lattice[cells]
    return low + (lattice[cells + 1] - low) * weights


def _lattice(seed: int, rows: ArrayLike, cols: ArrayLike) -> NDArray[np.float32]:
    return uniform(seed, rows, cols) * np.float32(2) - np.float32(1)


def wave(position: NDArray[np.float32]) -> NDArray[np.float32]:
    """A smooth wave of period 1 in [-1, 1], out of parabolas: -1 at integers, 1 half way."""
    t = position - np.floor(position)
    t *= 1 - t  # 0 ... 1/4
    return t * 8 - 1
