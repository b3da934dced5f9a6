"""Water: a river that keeps to its row of cells, and ponds, with soft shores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiledseg.geometry.box import Box
from tiledseg.synthetic.classes import WATER
from tiledseg.synthetic.noise import grid_noise, line_noise, point_noise
from tiledseg.synthetic.parcels import POND, RIVER, Places, SitePlan
from tiledseg.synthetic.warp import pixels

_BANK_C = np.array((0.150, 0.145, 0.085, 0.33), np.float32)
_WATER_C = np.array((0.030, 0.050, 0.052, 0.022), np.float32)
_MUD_C = np.array((0.085, 0.095, 0.070, 0.060), np.float32)
_DRY = -1000.0


def water_depth(seed: int, plan: SitePlan, places: Places, lobes: NDArray, ripple: NDArray) -> NDArray[np.float32]:
    """Metres from the shore, positive in water, roughly; -1000 where none is near.

    `lobes` and `ripple` are noise in [-1, 1] that bend the shores.
    """
    at, leaf = places.leaf.ravel(), plan.leaf
    depth = np.full(at.size, _DRY, np.float32)
    river = np.flatnonzero((plan.cell_kinds == RIVER).take(at, mode="clip"))
    if river.size:
        u, b = places.u.ravel()[river], places.b.ravel()[river]
        middle = plan.cell_heights[at[river]] * np.float32(0.5) + 34 * line_noise(seed + 100, u, 150.0)
        depth[river] = 9 + 3.5 * line_noise(seed + 101, u, 260.0) - np.abs(b - middle)
    pond = np.flatnonzero((leaf.kind == POND).take(at, mode="clip"))
    if pond.size:
        here = at[pond]
        u_half, v_half = (leaf.u1 - leaf.u0)[here] / 2, (leaf.v1 - leaf.v0)[here] / 2
        da = (places.a.ravel()[pond] - leaf.u0[here]) / u_half - 1
        db = (places.b.ravel()[pond] - leaf.v0[here]) / v_half - 1
        reach = 0.62 + 0.16 * lobes.ravel()[pond]
        depth[pond] = (reach - np.sqrt(da * da + db * db)) * np.minimum(u_half, v_half)
    depth += 0.8 * ripple.ravel()
    return depth.reshape(places.leaf.shape)


def water_depth_at(seed: int, plan: SitePlan, places: Places, x: NDArray, y: NDArray) -> NDArray[np.float32]:
    rows, cols = pixels(y), pixels(x)
    lobes, ripple = point_noise(seed + 102, rows, cols, 50), point_noise(seed + 103, rows, cols, 11)
    return water_depth(seed, plan, places, lobes, ripple)


def paint_water(seed: int, plan: SitePlan, places: Places, colour: NDArray, classes: NDArray, box: Box) -> None:
    if not ((plan.cell_kinds == RIVER) | (plan.leaf.kind == POND))[places.leaf].any():
        return
    lobes, ripple = grid_noise(seed + 102, box, 50), grid_noise(seed + 103, box, 11)
    depth = water_depth(seed, plan, places, lobes, ripple)
    bank = np.flatnonzero((depth > -3.0) & (depth <= 0))
    wet = np.flatnonzero(depth > 0)
    flat = colour.reshape(4, -1)
    share = 1 + depth.ravel()[bank] / 3
    flat[:, bank] += (_BANK_C[:, None] - flat[:, bank]) * share * np.float32(0.8)
    clear = np.minimum(depth.ravel()[wet] / 5, 1)
    surface = (
        1 + np.float32(0.10) * grid_noise(seed + 106, box, 60).ravel()[wet] + np.float32(0.05) * ripple.ravel()[wet]
    )
    flat[:, wet] = (_MUD_C[:, None] + (_WATER_C - _MUD_C)[:, None] * clear) * surface
    classes.reshape(-1)[wet] = WATER
