"""What to map and where to, and everything that can be refused of it before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiledseg.claim import check_unclaimed
from tiledseg.errors import RasterError
from tiledseg.inference.mapper import Mapper
from tiledseg.map_formats import Packing
from tiledseg.outputs import Output, check_outputs
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.plan import Extent, RunPlan, RunQuestion, plan_run
from tiledseg.raster.geopackage import check_vector, pixels_of, polygons_output
from tiledseg.raster.info import RasterInfo, reference_notes
from tiledseg.raster.layout import check_cut
from tiledseg.raster.reader import open_raster
from tiledseg.raster.writer import raster_output


@dataclass(frozen=True)
class Request:
    """A map to make. `grid` None is auto; `parallel.exact` False accepts a norm of a tile's statistics. No output may
    be one of `inputs`, the files that the request was read from. `packing`: how the files are kept. `polygons`: a
    GeoPackage of them, of at least `minimum_area` (`raster.geopackage.pixels_of`)."""

    image: str
    output: str
    probabilities: str | None = None
    grid: tuple[int, int] | None = None
    precision: str = "fp32"
    parallel: Parallelism = field(default_factory=Parallelism)
    references: bool = False
    inputs: tuple[str, ...] = ()
    threads: int = 2
    prefetch: int = 2
    verbosity: int = 1
    packing: Packing = field(default_factory=Packing)
    polygons: str | None = None
    minimum_area: str | None = None


@dataclass(frozen=True)
class PlannedMaps:
    """Requests that can start: one plan for all, and what is known of each image."""

    plan: RunPlan
    infos: tuple[RasterInfo, ...]
    classes: int


def plan_maps(requests: Sequence[Request], mapper: Mapper, memory_bytes: int, ranks: int) -> PlannedMaps:
    """The plan of requests that differ in their files only. Raises InputError for the first thing that cannot be."""
    first, network = requests[0], mapper.describe()
    infos = tuple(_info(request, mapper, network.bands) for request in requests)
    plan = plan_run(
        RunQuestion(
            network,
            tuple(Extent(info.shape, info.tiling.grid if info.tiling else None) for info in infos),  # a store's own
            ranks,
            memory_bytes,
            first.parallel,
            first.precision,
            grid=first.grid,
            trains=False,
        )
    )
    for info, tiling in zip(infos, plan.tilings, strict=True):
        check_cut(info, tiling)
    _check_outputs(requests, infos, network.classes, mapper)
    for request, info in zip(requests, infos, strict=True):
        pixels_of(request.minimum_area, info)
    return PlannedMaps(plan, infos, network.classes)


def _info(request: Request, mapper: Mapper, bands: int) -> RasterInfo:
    with open_raster(request.image, mapper.bands, mapper.nodata, request.references) as reader:
        info = reader.info
    if info.bands != bands:
        raise RasterError(
            f"{info.path} has {info.bands} bands but the network was trained on {bands}; give an image of the same "
            "bands"
        )
    return info


def _check_outputs(requests: Sequence[Request], infos: Sequence[RasterInfo], classes: int, mapper: Mapper) -> None:
    outputs = [one for request, info in zip(requests, infos, strict=True) for one in _outputs(request, info, classes)]
    read = (path for info in infos for path in (info.path, *info.files))
    check_outputs(outputs, [*read, *mapper.files, *requests[0].inputs])
    for output in outputs:
        for name in output.beside:
            check_unclaimed(name, output.path)


def _outputs(request: Request, info: RasterInfo, classes: int) -> list[Output]:
    found = [raster_output("--output", request.output, info, 1, "uint8", request.packing, legend=True)]
    if request.probabilities is not None:
        shares = raster_output("--probabilities", request.probabilities, info, classes, "float32", request.packing)
        found.append(shares)
    if request.polygons is not None:
        check_vector("--polygons")
        found.append(polygons_output("--polygons", request.polygons))
    return found


def notes(planned: PlannedMaps) -> tuple[str, ...]:
    """What to tell of the images and of the plan before the work."""
    return (*reference_notes(planned.infos), *planned.plan.warnings)
