"""The files of one map, from the empty ones that the ranks fill to those with their names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tiledseg.comm.watching.doing import doing, tick
from tiledseg.inference.request import Request, chosen_classes
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.maps.geopackage import (
    PolygonFile,
    begin,
    discard_polygons,
    pixels_of,
    polygon_notes,
    publish_polygons,
    write_polygons,
)
from tiledseg.raster.maps.writer import RasterLayout, discard, lay_out, pack_layout, publish
from tiledseg.system.run_lock import claimed

WHOLE_SHARE, NO_SHARE = 254, 255
"""Bytes of probabilities: the one that means 1, and the one that means no data."""


@dataclass(frozen=True)
class MapFiles:
    """The unfinished files of one map, classes before probabilities: a value to broadcast."""

    rasters: tuple[RasterLayout, ...] = ()
    polygons: PolygonFile | None = None

    def claim(self, held: ExitStack) -> None:
        """Keep other processes from writing the files until `held` is closed."""
        for layout in self.rasters:
            held.enter_context(claimed(layout.temporary, layout.path))
        if self.polygons is not None:
            held.enter_context(claimed(self.polygons.claim, self.polygons.path))

    def finish(self, request: Request, info: RasterInfo, legend: Sequence[ClassRecord], ignore_index: int) -> None:
        """Make the whole files from the ranks' pixels, under temporary names. On one rank, by all of its cores."""
        if self.polygons is not None:
            with doing("outlining the map's polygons"):
                classes = chosen_classes(request.polygons_classes, legend) - {ignore_index}
                least = pixels_of(request.minimum_area, info)
                write_polygons(self.polygons, self.rasters[0].temporary, info, legend, classes, least, tick)
        with doing("packing the map"):
            for layout in self.rasters:
                pack_layout(layout, len(os.sched_getaffinity(0)), tick)

    def publish(self) -> None:
        """Give each file its name. On one rank."""
        try:
            for layout in self.rasters:
                publish(layout)
            if self.polygons is not None:
                publish_polygons(self.polygons)
        except BaseException:  # a signal, say: a file that has its name by now keeps it
            self.discard()
            raise

    def discard(self) -> None:
        """Remove unfinished files. On any rank: the others may be ended unheard."""
        for layout in self.rasters:
            discard(layout)
        if self.polygons is not None:
            discard_polygons(self.polygons)

    def notes(self, info: RasterInfo) -> tuple[str, ...]:
        """Return warnings on what a map does not keep of its image, and on styles that stay beside it."""
        styles = [layout for layout in self.rasters if layout.legend and layout.style is None]
        stays = [
            f"the style beside {one.path} stays as it was; remove it for one of this map's classes" for one in styles
        ]
        return (*self.rasters[0].notes, *stays, *(polygon_notes(info) if self.polygons is not None else ()))


def lay_out_files(
    request: Request, info: RasterInfo, legend: Sequence[ClassRecord], ignore_index: int, made: list[MapFiles]
) -> MapFiles:
    """Make the empty files of a map. `made` holds those that exist so far, for the case of a failure."""
    layout = lay_out(request.output, info, 1, "uint8", float(ignore_index), legend, packing=request.packing)
    made[:] = [MapFiles((layout,))]
    if request.probabilities is not None:
        as_bytes = request.probability_type == "uint8"
        shares = lay_out(
            request.probabilities,
            info,
            len(legend),
            request.probability_type,
            float(NO_SHARE) if as_bytes else float("nan"),
            descriptions=[f"probability of {one.name}" for one in legend],
            packing=request.packing.of_shares(request.probability_type),
            scale=1 / WHOLE_SHARE if as_bytes else None,
        )
        made[:] = [MapFiles((layout, shares))]
    if request.polygons is not None:
        made[:] = [replace(made[0], polygons=begin(request.polygons))]
    return made[0]


def in_bytes(shares_KHW: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return probabilities as whole numbers of 1/254, rounded to the nearest (half to even); 255 for NaN. The bytes of
    a pixel need not add up to 254."""
    with np.errstate(invalid="ignore"):  # NaN, which is set after
        bytes_KHW = np.rint(shares_KHW.astype(np.float64) * WHOLE_SHARE).astype(np.uint8)
    bytes_KHW[np.isnan(shares_KHW)] = NO_SHARE
    return bytes_KHW
