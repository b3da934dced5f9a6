"""Requests of maps, and all that can be refused of them before anything is written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tiledseg.config.checks import with_times
from tiledseg.config.map_formats import NO_VIEWS, ZARR, Packing
from tiledseg.errors import ConfigError, OutputError, RasterError
from tiledseg.inference.trained import Mapper
from tiledseg.memory.mover import HOST
from tiledseg.planning.run.blocks import BlocksAsked
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.raster.composed import label_of
from tiledseg.raster.finding import check_assets, expand_sources
from tiledseg.raster.geopackage import pixels_of, polygons_output
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.joined import check_order, stem_of
from tiledseg.raster.labels.classes import ClassRecord, default_classes
from tiledseg.raster.labels.pair_reading import area_reader
from tiledseg.raster.lists import EVERY, Composing
from tiledseg.raster.map_writer import raster_output
from tiledseg.raster.reader import open_raster
from tiledseg.raster.remote import is_bucket_folder
from tiledseg.raster.samples.dataset import check_cut
from tiledseg.raster.statistics import Normalization
from tiledseg.raster.tile_store import parse_store_name
from tiledseg.system.files import irregular_kind
from tiledseg.system.outputs import Output, check_outputs
from tiledseg.system.run_lock import check_unclaimed
from tiledseg.user_files.machine import machine_of

TRAINING, IMAGE = ("training", "image")
"""Normalisation by the training images, or by the bands of the raster that is mapped."""


@dataclass(frozen=True)
class Request:
    """A map to make.

    `grid` None is auto. `parallel.exact` False accepts a norm of a tile's statistics. No output may be one of `inputs`,
    the files that the request was read from. `probability_type`: float32, or uint8 (`mapping.in_bytes`). `polygons`:
    a GeoPackage of `polygons_classes` (None: all), of at least `minimum_area` (`raster.geopackage.pixels_of`).
    `views`: a word of `VIEWS`. `area`: a file of polygons; pixels outside have no data in the map. `verify`:
    a traced network is compared with its module first. `blocks`: tiles are computed in blocks, kept in `store`.
    `machine`: the profile of the machine; a map on a CPU has smaller tiles. `composing`: how images are made of
    rasters.
    """

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
    probability_type: str = "float32"
    polygons: str | None = None
    minimum_area: str | None = None
    polygons_classes: tuple[str, ...] | None = None
    views: str = NO_VIEWS
    normalize: str = TRAINING
    area: str | None = None
    blocks: BlocksAsked | None = None
    store: str = HOST
    machine: str | None = None
    verify: bool = True
    composing: Composing = Composing()  # noqa: RUF009


_OTHER_FORMATS = re.compile(r"\.(png|jpe?g|jp2|gif|bmp|webp|img|vrt|nc|h5|hdf5|gpkg|zarr)", re.IGNORECASE)
_ENDINGS = {"cog": ".tif", "gtiff": ".tif", "zarr": ".zarr"}


def each_image(
    request: Request, images: Sequence[str], targets: Mapping[str, str | None], run: Composing | None = None
) -> list[Request]:
    """Return `request` for each of the `images`: paths, folders, globs, URLs, and lists, every split included.
    `run`: how images of the training were made; what the request names itself goes before.

    `targets` are the outputs by the request's names: a file of one image, a folder of several, in which a file has its
    image's name. A name that ends in a slash is a folder too.

    Raise RasterError where there is no such image, OutputError where a folder is not there, or two images have one
    name.
    """
    given = {name: target for name, target in targets.items() if target is not None}
    composing = request.composing.like(run or Composing(), images)
    images = with_times(images, composing.times, "--image")
    check_order((*images, f"{{{','.join(composing.times)}}}"), run.times if run else ())
    paths = expand_sources(images, "--image", EVERY, request.references, composing)
    check_assets(request.composing.assets, paths, "--assets")
    folders = set()
    for name, target in given.items():
        if is_bucket_folder(target) or irregular_kind(target) == "a folder":
            if len(paths) > 1 or target.endswith("/"):
                folders.add(name)
        elif len(paths) > 1:
            raise OutputError(
                f"--{name} is {target}, but --image has {len(paths)} rasters; give a folder that is there, or "
                "s3:// with a slash at its end"
            )
    requests: dict[str, Request] = {}
    for path in paths:
        name = os.path.basename(path) if parse_store_name(path) else stem_of(path.rstrip("/"))
        stem = re.sub(r"[^\w.+-]", "-", name)  # images of a store keep their number, or their variable
        if stem in requests:
            raise OutputError(
                f"--image has {label_of(requests[stem].image)} and {label_of(path)}, whose maps would be one file; "
                "make two calls"
            )
        files: dict[str, Any] = {}
        for name, target in given.items():
            ending = ".gpkg" if name == "polygons" else _ENDINGS[request.packing.format]
            files[name] = os.path.join(target, stem + ending) if name in folders else target
        requests[stem] = replace(request, image=path, **files)
    return list(requests.values())


PlannedMaps = tuple[RunPlan, tuple[RasterInfo, ...], int]


def plan_maps(
    requests: Sequence[Request], mapper: Mapper, memory_bytes: int, ranks: int, usual: str | None = None
) -> PlannedMaps:
    """Plan requests that differ in their files only: one plan for all, the information on each image, the number of
    classes. `usual`: the machine where they name none. Raises InputError."""
    first, network = requests[0], mapper.describe()
    given = mapper.normalization
    if first.normalize == IMAGE and (given is None or given == Normalization.identity(len(given.mean))):
        raise ConfigError(
            "--normalize is image, but the network takes pixels as they are (data.normalize false, or no --mean); use "
            "training"
        )
    infos = []
    for request in requests:
        with open_raster(request.image, mapper.bands, mapper.nodata, request.references) as reader:
            infos.append(reader.info)
        if reader.info.bands != network.bands:
            raise RasterError(
                f"{reader.info.path} has {reader.info.bands} bands but the network was trained on {network.bands}; "
                "give an image of the same bands"
            )
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
            blocks=first.blocks,
            machine=machine_of(first.machine or usual),
        )
    )
    for info, tiling in zip(infos, plan.tilings, strict=True):
        check_cut(info, tiling)
        _check_views(first.views, info, plan)
    _check_outputs(requests, infos, network.classes, mapper)
    chosen_classes(first.polygons_classes, mapper.legend or default_classes(network.classes))
    for request, info in zip(requests, infos, strict=True):
        pixels_of(request.minimum_area, info)
        if request.area is not None and not area_reader(request.area, info, "--area").count:
            raise RasterError(f"--area {request.area} has no polygon in {info.path}; check its CRS and its place")
    return plan, tuple(infos), network.classes


def chosen_classes(words: Sequence[str] | None, legend: Sequence[ClassRecord]) -> frozenset[int]:
    """Return the numbers of the classes that have polygons: all, or those of `words`. Raises ConfigError."""
    names = [record.name for record in legend]
    known = {**{str(number): number for number in range(len(names))}, **{name: k for k, name in enumerate(names)}}
    for word in words or ():
        if word not in known:
            raise ConfigError(f"--polygons-classes has '{word}'; give names or numbers of {', '.join(names)}")
    return frozenset(range(len(names)) if words is None else (known[word] for word in words))


def _check_views(views: str, info: RasterInfo, plan: RunPlan) -> None:
    """Raise ConfigError or RasterError where a reflected raster has no windows."""
    if views == NO_VIEWS:
        return
    if plan.spread.shares_images:
        raise ConfigError(
            f"--tta is {views}, whose views of a tile one rank maps, but --parallel.halo is {plan.spread.mode}; use "
            "--parallel.halo read"
        )
    if plan.blocks is not None:
        raise ConfigError(f"--tta is {views}, which looks at whole tiles, but --memory.blocks is given; leave one out")
    if info.tiling is not None:
        raise RasterError(f"--tta is {views}, but {info.path} is a tile store, whose tiles are cut; give the raster")


def _check_outputs(requests: Sequence[Request], infos: Sequence[RasterInfo], classes: int, mapper: Mapper) -> None:
    """Refuse outputs that cannot be written, or would replace what is read."""
    outputs: list[Output] = []
    for request, info in zip(requests, infos, strict=True):
        outputs.append(raster_output("--output", request.output, info, 1, "uint8", request.packing, legend=True))
        if request.probabilities is not None:
            packing = request.packing.of_shares(request.probability_type)
            shares = info, classes, request.probability_type, packing
            outputs.append(raster_output("--probabilities", request.probabilities, *shares))
        if request.polygons is not None:
            outputs.append(polygons_output("--polygons", request.polygons))
    read = (path for info in infos for path in (info.path, *info.files))
    area = [] if requests[0].area is None else [requests[0].area]
    check_outputs(outputs, [*read, *mapper.files, *requests[0].inputs, *area])
    for output in outputs:
        if (
            output.key != "--polygons"
            and requests[0].packing.format != ZARR
            and _OTHER_FORMATS.fullmatch(Path(output.path).suffix)
        ):
            raise OutputError(
                f"{output.key} is '{output.path}', but a GeoTIFF is written there; give a name that ends in .tif"
            )
        for name in output.beside:
            check_unclaimed(name, output.path)
