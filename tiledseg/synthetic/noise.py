"""Random numbers without a state: hashes and smooth noise that are functions of a seed and a place.

Only additions, multiplications, divisions, square roots and comparisons, which IEEE 754 rounds in one way: the same
place gives the same bits in any window, on any machine. No BLAS and no library sine, which may not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiledseg.geometry.box import Box


def hash32(seed: int, *keys: ArrayLike) -> NDArray[np.uint32]:
    """Return 32 well-mixed bits for each combination of integer keys (broadcast together).

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
    """Return a uniform number in [0, 1), float32, for each combination of keys."""
    return (hash32(seed, *keys) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def normal_CHW(seed: int, box: Box) -> NDArray[np.float32]:
    """Return four nearly normal values, sums of four bytes, for every pixel of `box`, shape (4, H, W)."""
    rows, cols = np.arange(box.row.start, box.row.stop), np.arange(box.col.start, box.col.stop)
    bits_CHW = np.stack([hash32(seed + band, rows[:, None], cols) for band in range(4)])
    sums_CHW = bits_CHW.view(np.uint8).reshape(*bits_CHW.shape, 4).sum(-1, dtype=np.int32)
    return (sums_CHW - 510).astype(np.float32) * np.float32(1 / 147.8)


def _smooth(t: NDArray) -> NDArray:
    """Evaluate Perlin's quintic 6t^5 - 15t^4 + 10t^3: first and second derivative 0 at both ends."""
    return t * t * t * (t * (t * 6 - 15) + 10)


def grid_noise(seed: int, box: Box, period: int) -> NDArray[np.float32]:
    """Return smooth value noise in [-1, 1] at every pixel of `box`, with one random value every `period` pixels."""
    rows, cols = np.arange(box.row.start, box.row.stop), np.arange(box.col.start, box.col.stop)
    i, j = rows // period, cols // period
    row_weights, col_weights = (_smooth((at % period).astype(np.float32) / np.float32(period)) for at in (rows, cols))
    lattice = _lattice(seed, np.arange(i[0], i[-1] + 2)[:, None], np.arange(j[0], j[-1] + 2))
    lines = lattice[:, j - j[0]]
    lines = lines + (lattice[:, j - j[0] + 1] - lines) * col_weights
    steps = lines[1:] - lines[:-1]
    return lines[i - i[0]] + steps[i - i[0]] * row_weights[:, None]


def _lattice(seed: int, rows: ArrayLike, cols: ArrayLike) -> NDArray[np.float32]:
    return uniform(seed, rows, cols) * np.float32(2) - np.float32(1)


def wave(position: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a smooth wave of period 1 in [-1, 1], out of parabolas: -1 at integers, 1 half way."""
    t = position - np.floor(position)
    return t * (1 - t) * 8 - 1
