"""The bending of the plan: smooth noise added to x and y, and its inverse."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiledseg.geometry.box import Box
from tiledseg.synthetic.noise import grid_noise, point_noise

METRES = 0.5
"""Side of a pixel, metres."""

_WAVES = ((6400, 300.0), (1400, 60.0), (420, 15.0))
"""(period in pixels, amplitude in metres) of the noise. Its slope is at most 3.75 amplitudes a period, 0.94 in all:
below 1, so that the plan never folds."""

_ANCHOR = 70.0
"""Metres right and down of the origin to where nothing is bent, so that every scene begins in the village."""


def pixels(metres: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pixel positions, fractional, of places in metres: pixel 0 has its centre at half its side."""
    return metres / METRES - 0.5


class Warp:
    """u = x + w(x, y), v = y + w'(x, y): axis 0 and axis 1. Metres."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        anchor = np.array([_ANCHOR])
        self._anchor = tuple(float(self._free(anchor, anchor, axis)[0]) for axis in (0, 1))

    def grid(self, box: Box, axis: int) -> NDArray[np.float32]:
        """Metres added to x or y at each pixel of `box`."""
        bent = np.full(box.shape, -self._anchor[axis], np.float32)
        for k, (period, amplitude) in enumerate(_WAVES):
            bent += grid_noise(self._seed + 10 * axis + k, box, period) * np.float32(amplitude)
        return bent

    def points(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(u, v) of scattered places."""
        return x + self._free(x, y, 0) - self._anchor[0], y + self._free(x, y, 1) - self._anchor[1]

    def inverse(
        self, u: NDArray[np.float64], v: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(x, y) of places (u, v), by fixed-point iteration: the warp is a contraction nearly everywhere."""
        x, y = u, v
        for _ in range(12):
            guess_u, guess_v = self.points(x, y)
            x, y = x + (u - guess_u), y + (v - guess_v)
        return x, y

    def _free(self, x: NDArray[np.float64], y: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        rows, cols = pixels(y), pixels(x)
        bent = np.zeros(x.shape)
        for k, (period, amplitude) in enumerate(_WAVES):
            bent += point_noise(self._seed + 10 * axis + k, rows, cols, period) * amplitude
        return bent
