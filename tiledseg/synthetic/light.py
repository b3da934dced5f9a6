"""Light: shadows and slopes of what stands on the ground, and the lens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiledseg.synthetic.trees import MAX_HEIGHT
from tiledseg.synthetic.warp import METRES

SHADE = (-0.8, -0.6)
"""Where shadows fall (row, col), unit vector: the sun stands in the south-east."""
TANGENT = 1.25
"""Tangent of the sun's elevation, 51 degrees."""
SHADOW_PIXELS = int(MAX_HEIGHT / TANGENT / METRES) + 1
"""No shadow is longer; at the lower and right side, heights are needed this much and 1 pixel further."""


def cast_shadows(height_HW: NDArray[np.float32], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Shadow in 0 ... 1 on the pixels of `shape` that begin at (1, 1) of `height_HW` (metres).

    The ray from a pixel to the sun is followed pixel by pixel; it is blocked where something stands higher.
    """
    rows, cols = shape
    highest = np.zeros(shape, np.float32)
    step = np.empty(shape, np.float32)
    for k in range(1, SHADOW_PIXELS):
        row, col = 1 + round(-k * SHADE[0]), 1 + round(-k * SHADE[1])
        np.subtract(height_HW[row : row + rows, col : col + cols], np.float32(k * METRES * TANGENT), out=step)
        np.maximum(highest, step, out=highest)
    highest -= height_HW[1 : 1 + rows, 1 : 1 + cols]
    highest /= np.float32(0.8)
    return np.clip(highest, 0, 1, out=highest)


def light_on_slopes(height_HW: NDArray[np.float32], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Sunlight on the same pixels relative to flat ground, by Lambert's law; 1 on the ground itself."""
    rows, cols = shape
    by_row = height_HW[2 : 2 + rows, 1 : 1 + cols] - height_HW[:rows, 1 : 1 + cols]
    by_col = height_HW[1 : 1 + rows, 2 : 2 + cols] - height_HW[1 : 1 + rows, :cols]
    np.clip(by_row, -1.1, 1.1, out=by_row)
    np.clip(by_col, -1.1, 1.1, out=by_col)
    toward = 1 + (by_row * np.float32(SHADE[0]) + by_col * np.float32(SHADE[1])) / np.float32(TANGENT)
    light = np.maximum(toward, np.float32(0.12)) / np.sqrt(1 + by_row * by_row + by_col * by_col)
    return np.where(height_HW[1 : 1 + rows, 1 : 1 + cols] > 0.4, light, np.float32(1))


def blur(light_CHW: NDArray[np.float32]) -> NDArray[np.float32]:
    """The lens: weights 0.22, 0.56, 0.22 along each dim; one pixel smaller on each side."""
    side, centre = np.float32(0.22), np.float32(0.56)
    lines = light_CHW[:, :-2] + light_CHW[:, 2:]
    lines *= side
    lines += light_CHW[:, 1:-1] * centre
    blurred = lines[:, :, :-2] + lines[:, :, 2:]
    blurred *= side
    blurred += lines[:, :, 1:-1] * centre
    return blurred
