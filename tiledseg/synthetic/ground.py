"""What lies flat: fields with their rows, lawns and the floors of woods; water and roads over them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiledseg.geometry.box import Box
from tiledseg.synthetic.classes import TREE
from tiledseg.synthetic.noise import grid_noise, wave
from tiledseg.synthetic.parcels import FIELD, LOT, WOOD, Places, SitePlan
from tiledseg.synthetic.roads import paint_roads
from tiledseg.synthetic.water import paint_water

_CROPS_C = np.array(
    [
        (0.080, 0.125, 0.055, 0.42),  # cereals
        (0.065, 0.110, 0.050, 0.50),  # maize, beets
        (0.095, 0.140, 0.060, 0.45),  # ley
        (0.170, 0.175, 0.090, 0.36),  # ripening
        (0.310, 0.265, 0.160, 0.38),  # stubble
        (0.205, 0.155, 0.110, 0.25),  # ploughed
        (0.330, 0.270, 0.195, 0.37),  # dry soil
        (0.290, 0.285, 0.060, 0.47),  # rape in flower
    ],
    np.float32,
)
_LAWNS_C = np.array(
    [
        (0.085, 0.130, 0.058, 0.44),
        (0.110, 0.145, 0.070, 0.42),
        (0.150, 0.160, 0.090, 0.36),
        (0.072, 0.115, 0.052, 0.46),
    ],
    np.float32,
)
_FLOOR_C = np.array((0.048, 0.068, 0.036, 0.30), np.float32)


class Ground(NamedTuple):
    """Reflectance (4, H, W) float32 and class (H, W) uint8."""

    colour_CHW: NDArray[np.float32]
    class_HW: NDArray[np.uint8]


class Cover(NamedTuple):
    """How each parcel of a plan is covered: one column a parcel."""

    colour: NDArray[np.float32]
    patchiness: NDArray[np.float32]
    """Strength of the patches."""
    furrows: NDArray[np.float32]
    """Strength of the rows."""
    frequency: NDArray[np.float32]
    """Rows a metre."""
    turned: NDArray[np.bool_]
    """Whether rows run along v."""


def cover_of(plan: SitePlan) -> Cover:
    """Crops, lawns and floors of the parcels, from their random bits."""
    kind, bits = plan.leaf.kind, plan.leaf_hash

    def part(shift: int, count: int) -> NDArray[np.int64]:
        return ((bits >> np.uint32(shift)) & np.uint32(255)).astype(np.int64) * count // 256

    crop, lawn = part(0, len(_CROPS_C)), part(0, len(_LAWNS_C))
    colour = np.where((kind == FIELD)[:, None], _CROPS_C[crop], _LAWNS_C[lawn])
    tone = 0.86 + 0.28 * part(16, 256).astype(np.float32)[:, None] / 256
    field, period = kind == FIELD, 1.8 + 0.15 * part(24, 16).astype(np.float32)
    bare = field & (crop >= 4) & (crop <= 6)
    return Cover(
        np.ascontiguousarray((colour * tone).T),
        np.select([field, kind == LOT], [0.20, 0.22], 0.30).astype(np.float32),
        np.where(field, np.where(bare, 0.09, 0.13), 0.0).astype(np.float32),
        (1 / period).astype(np.float32),
        (plan.leaf.u1 - plan.leaf.u0 < plan.leaf.v1 - plan.leaf.v0),
    )


def paint_ground(
    seed: int,
    plan: SitePlan,
    cover: Cover,
    places: Places,
    stretch: tuple[NDArray, NDArray],
    fine_HW: NDArray,
    box: Box,
) -> Ground:
    """Colours and classes of the pixels of `box`.

    `stretch` is |grad u| and |grad v|, by which distances in the plan exceed those on the ground; `fine_HW` is noise
    in [-1, 1] from pixel to pixel.
    """
    at = places.leaf
    patches = grid_noise(seed + 104, box, 130) * np.float32(0.6) + grid_noise(seed + 105, box, 23) * np.float32(0.4)
    tone = patches * cover.patchiness.take(at, mode="clip")
    across = np.where(cover.turned.take(at, mode="clip"), places.a, places.b)
    furrows = wave(across * cover.frequency.take(at, mode="clip")) * cover.furrows.take(at, mode="clip")
    tracks = (furrows != 0) & (wave(across * np.float32(1 / 16)) > np.float32(0.93))  # of the tractor
    tone += np.where(tracks, np.float32(-0.2), furrows)
    tone += fine_HW * np.float32(0.07)
    colour = np.empty((4, *box.shape), np.float32)
    for band in range(4):
        # Patches are drier or lusher plants: brighter in the visible, darker in near infrared.
        factor = tone * np.float32(-0.45 if band == 3 else 1.0)
        factor += 1
        np.multiply(cover.colour[band].take(at, mode="clip"), factor, out=colour[band])
    classes = np.zeros(box.shape, np.uint8)
    _paint_undergrowth(seed, plan, places, fine_HW, colour, classes, box)
    paint_water(seed, plan, places, colour, classes, box)
    paint_roads(seed, plan, places, stretch, fine_HW, colour, classes)
    return Ground(colour, classes)


def wood_edge(clump: NDArray) -> NDArray:
    """How far from its parcel's border a wood begins, metres: 0.5 to 16, uneven. `clump` is noise in [-1, 1]."""
    return np.maximum(5.0 + 11.0 * clump, 0.5)


def _paint_undergrowth(
    seed: int, plan: SitePlan, places: Places, fine_HW: NDArray, colour: NDArray, classes: NDArray, box: Box
) -> None:
    """The gaps between the crowns of a wood: dark, and tree, too."""
    leaf = plan.leaf
    found = np.flatnonzero((leaf.kind == WOOD).take(places.leaf, mode="clip"))
    if found.size == 0:
        return
    at, a, b = (part.ravel()[found] for part in (places.leaf, places.a, places.b))
    clump = grid_noise(seed + 90, box, 60).ravel()[found]
    margin = np.minimum(
        np.minimum(a - leaf.u0[at] - leaf.road_u0[at], leaf.u1[at] - leaf.road_u1[at] - a),
        np.minimum(b - leaf.v0[at] - leaf.road_v0[at], leaf.v1[at] - leaf.road_v1[at] - b),
    )
    closed = found[margin > wood_edge(clump) + 2.0]
    colour.reshape(4, -1)[:, closed] = _FLOOR_C[:, None] * (1 + np.float32(0.15) * fine_HW.ravel()[closed])
    classes.reshape(-1)[closed] = TREE
