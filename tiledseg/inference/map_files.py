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
"""Of probabilities as bytes: the one that means 1, and the one that means no data."""


@dataclass(frozen=True)
class MapFiles:
    """The files of one map that are not whole yet: a value to broadcast."""

    rasters: tuple[RasterLayout, ...] = ()
    polygons: PolygonFile | None = None


def lay_out_files(
    request: Request, info: RasterInfo, legend: Sequence[ClassRecord], ignore_index: int, made: list[MapFiles]
) -> MapFiles:
    """The empty files of a map, of which `made` holds those that are there: classes, then probabilities."""
    packing = request.packing
    layout = lay_out(request.output, info, 1, "uint8", float(ignore_index), legend, packing=packing)
    made[:] = [MapFiles((layout,))]
    if request.probabilities is not None:
        made[:] = [MapFiles((layout, _lay_out_shares(request.probabilities, request, info, legend)))]
    if request.polygons is not None:
        made[:] = [replace(made[0], polygons=begin(request.polygons))]
    return made[0]


def _lay_out_shares(path: str, request: Request, info: RasterInfo, legend: Sequence[ClassRecord]) -> RasterLayout:
    """A band a class: float32, NaN without data, or bytes (`in_bytes`)."""
    as_bytes = request.probability_type == "uint8"
    return lay_out(
        path,
        info,
        len(legend),
        request.probability_type,
        float(NO_SHARE) if as_bytes else float("nan"),
        descriptions=[f"probability of {one.name}" for one in legend],
        packing=request.packing.of_shares(request.probability_type),
        scale=1 / WHOLE_SHARE if as_bytes else None,
    )


def in_bytes(shares_KHW: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Probabilities as whole numbers of 1/254, each the nearest one (of two as near the even one); 255 for NaN.

    A byte is off by half of 1/254 at most; the bytes of a pixel need not add up to 254."""
    with np.errstate(invalid="ignore"):  # NaN, which is set after
        found_KHW = np.rint(shares_KHW.astype(np.float64) * WHOLE_SHARE).astype(np.uint8)
    found_KHW[np.isnan(shares_KHW)] = NO_SHARE
    return found_KHW


def claim_files(files: MapFiles, held: ExitStack) -> None:
    """Nobody else writes them until `held` lets go."""
    for layout in files.rasters:
        held.enter_context(claimed(layout.temporary, layout.path))
    if files.polygons is not None:
        held.enter_context(claimed(files.polygons.claim, files.polygons.path))


def finish_files(
    files: MapFiles, request: Request, info: RasterInfo, legend: Sequence[ClassRecord], ignore_index: int
) -> None:
    """Make the whole files from what the ranks have written, under names of their own. On one rank, by all cores that
    it may run on: the others wait."""
    if files.polygons is not None:
        with doing("outlining the map's polygons"):
            classes = chosen_classes(request.polygons_classes, legend) - {ignore_index}
            least = pixels_of(request.minimum_area, info)
            write_polygons(files.polygons, files.rasters[0].temporary, info, legend, classes, least, tick)
    with doing("packing the map"):
        for layout in files.rasters:
            pack_layout(layout, len(os.sched_getaffinity(0)), tick)


def publish_files(files: MapFiles) -> None:
    """Give each its name. On one rank."""
    try:
        for layout in files.rasters:
            publish(layout)
        if files.polygons is not None:
            publish_polygons(files.polygons)
    except BaseException:  # a signal, say: what has its name by now keeps it
        discard_files(files)
        raise


def discard_files(files: MapFiles) -> None:
    """Remove what is not whole: on any rank, for the others may be ended unheard."""
    for layout in files.rasters:
        discard(layout)
    if files.polygons is not None:
        discard_polygons(files.polygons)


def file_notes(files: MapFiles, request: Request, info: RasterInfo) -> tuple[str, ...]:
    """What a map does not keep of its image, and whose style stays beside it."""
    styles = [layout for layout in files.rasters if layout.legend and layout.style is None]
    stays = [f"the style beside {one.path} stays as it was; remove it for one of this map's classes" for one in styles]
    return (*files.rasters[0].notes, *stays, *(polygon_notes(info) if request.polygons is not None else ()))
