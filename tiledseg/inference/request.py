"""Requests of maps, their checks before anything is written, and the upload of maps to s3://.

Ranks write their pixels at random offsets of one file (`raster.map_writer`), which no object store supports. So a local
folder mirrors the buckets: a map is finished in it and then uploaded, the raster last. An unfinished map never has the
object's name; a map that cannot be uploaded stays in the folder.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tiledseg.comm.doing import doing, tick
from tiledseg.comm.mesh import Mesh
from tiledseg.config.checks import with_times
from tiledseg.config.run import Config
from tiledseg.config.words import NO_VIEWS, ZARR, Packing
from tiledseg.errors import ConfigError, InputError, OutputError, RasterError, WriteError, require
from tiledseg.inference.trained import Mapper
from tiledseg.planning.run.blocks import BlockSettings
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Parallelism, parallelism
from tiledseg.raster.composed import label_of, stem_of
from tiledseg.raster.finding import check_assets, expand_sources
from tiledseg.raster.geopackage import polygons_output
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import ClassRecord, default_classes
from tiledseg.raster.labels.pair_reading import area_reader
from tiledseg.raster.lists import EVERY, SourceRules
from tiledseg.raster.map_writer import SIDECARS, raster_output
from tiledseg.raster.reader import open_raster
from tiledseg.raster.remote import (
    RemoteName,
    check_writable,
    gdal_path,
    is_bucket_folder,
    is_remote,
    is_there,
    parse_s3,
    put,
    remove,
)
from tiledseg.raster.samples.dataset import check_cut
from tiledseg.raster.statistics import Normalization
from tiledseg.raster.tile_store import parse_store_name
from tiledseg.system.files import irregular_kind
from tiledseg.system.outputs import Output, check_ending, check_outputs, check_unclaimed, files_below
from tiledseg.user_files.machine import SOME_CPU, find_machine, machine_of

TRAINING, IMAGE = ("training", "image")
"""Normalisation by the training images, or by the mapped image."""


@dataclass(frozen=True)
class Request:
    """A request of a map. `config`: of its groups those keys that are flags of `predict`.

    `inputs`: files that the request was read from, which no output may replace. `polygons`: GeoPackage of the areas of
    `polygons_classes` (None: all). `views`: one of `VIEWS`. `blocks`: compute tiles in blocks.
    """

    image: str
    output: str
    probabilities: str | None = None
    polygons: str | None = None
    config: Config = field(default_factory=Config)
    inputs: tuple[str, ...] = ()
    packing: Packing = field(default_factory=Packing)
    polygons_classes: tuple[str, ...] | None = None
    views: str = NO_VIEWS
    normalize: str = TRAINING
    blocks: BlockSettings | None = None

    @property
    def parallel(self) -> Parallelism:
        """Return the spread as set; small images may leave ranks of an automatic mesh idle."""
        settings = parallelism(self.config.parallel)
        automatic = settings.mesh is None and settings.stages == 1
        return replace(settings, idle_ranks=settings.idle_ranks or automatic)


_ENDINGS = {"cog": ".tif", "gtiff": ".tif", "zarr": ".zarr"}


def each_image(
    request: Request, images: Sequence[str], targets: Mapping[str, str | None], run: SourceRules | None = None
) -> list[Request]:
    """Return `request` for each of the `images`: paths, folders, globs, URLs, and lists with every split. `run`: how
    the training's images were made; the request's own values take precedence.

    `targets`: outputs by the request's names: a file for one image, a folder for several, with files named after the
    images. A name that ends in a slash is a folder too.

    Raise RasterError for a missing image, OutputError for a missing folder, and if two images have one name.
    """
    wanted = {name: target for name, target in targets.items() if target is not None}
    own = SourceRules(*request.config.data.composing, EVERY)
    composing = own.like(run or SourceRules(), images)
    images = with_times(images, composing.times, "--image")
    paths = expand_sources(images, "--image", composing)
    check_assets(own.assets, paths)
    folders = set()
    for name, target in wanted.items():
        if is_bucket_folder(target) or irregular_kind(target) == "a folder":
            if len(paths) > 1 or target.endswith("/"):
                folders.add(name)
        elif len(paths) > 1:
            raise OutputError(
                f"--{name} is {target}, but --image has {len(paths)} rasters; give a folder that exists, or "
                "s3:// with a slash at its end"
            )
    requests: dict[str, Request] = {}
    for path in paths:
        name = os.path.basename(path) if parse_store_name(path) else stem_of(path.rstrip("/"))
        stem = re.sub(r"[^\w.+-]", "-", name)  # the name of a store's image has its number, or its variable
        if stem in requests:
            raise OutputError(
                f"--image has {label_of(requests[stem].image)} and {label_of(path)}, whose maps would be one file; "
                "make two calls"
            )
        files: dict[str, Any] = {}
        for name, target in wanted.items():
            ending = ".gpkg" if name == "polygons" else _ENDINGS[request.packing.format]
            files[name] = os.path.join(target, stem + ending) if name in folders else target
        requests[stem] = replace(request, image=path, **files)
    return list(requests.values())


def plan_maps(
    requests: Sequence[Request], mapper: Mapper, memory_bytes: int, ranks: int, on_cpu: bool
) -> tuple[RunPlan, tuple[RasterInfo, ...]]:
    """Plan requests that differ in their files only; return the plan and the information on each image. `on_cpu`: if
    they name no machine, ranks are like this one, on a processor. Raises InputError."""
    first, network, config = requests[0], mapper.describe(), requests[0].config
    own = mapper.normalization
    if first.normalize == IMAGE and (own is None or own == Normalization.identity(len(own.mean))):
        raise ConfigError(
            "--normalize is image, but the network takes pixels as they are (data.normalize false, or no --mean); use "
            "training"
        )
    infos = []
    for request in requests:
        with open_raster(request.image, mapper.bands, mapper.nodata, first.config.data.references) as reader:
            infos.append(reader.info)
        if reader.info.bands != network.bands:
            what = f"{reader.info.path} has {reader.info.bands} bands but the network was trained on {network.bands}"
            raise RasterError("; ".join((f"{what}; give an image of the same bands", *reader.info.notes)))
    here = replace(find_machine(SOME_CPU), threads=torch.get_num_threads()) if on_cpu else None
    plan = plan_run(
        RunQuestion(
            network,
            tuple(Extent(info.shape, info.tiling.grid if info.tiling else None) for info in infos),  # a store's own
            ranks,
            memory_bytes,
            first.parallel,
            config.train.precision,
            grid=config.tiling.grid_shape(),
            trains=False,
            blocks=first.blocks,
            machine=machine_of(config.parallel.machine) or here,
        )
    )
    for info, tiling in zip(infos, plan.tilings, strict=True):
        check_cut(info, tiling)
    if first.views != NO_VIEWS:
        views = f"--tta is {first.views}, which needs whole tiles on a rank, but"
        if stored := [info.path for info in infos if info.tiling is not None]:
            raise RasterError(f"{views} {stored[0]} is a tile store, whose tiles are cut; give the raster")
        if plan.spread.shares_images:
            raise ConfigError(f"{views} --parallel.halo is {plan.spread.mode}; use --parallel.halo read")
        if plan.blocks is not None:
            raise ConfigError(f"{views} --memory.blocks is given; leave one out")
    _check_outputs(requests, infos, network.classes, mapper)
    chosen_classes(first.polygons_classes, mapper.legend or default_classes(network.classes))
    for info in infos:
        if config.data.area is not None and not area_reader(config.data.area, info, "--area").count:
            raise RasterError(f"--area {config.data.area} has no polygon in {info.path}; check its CRS and its place")
    return plan, tuple(infos)


def chosen_classes(words: Sequence[str] | None, legend: Sequence[ClassRecord]) -> frozenset[int]:
    """Return the numbers of the classes named by `words` (names or numbers; None: all). Raises ConfigError."""
    names = [record.name for record in legend]
    known = {**{str(number): number for number in range(len(names))}, **{name: k for k, name in enumerate(names)}}
    for word in words or ():
        if word not in known:
            raise ConfigError(f"--polygons-classes has '{word}'; give names or numbers of {', '.join(names)}")
    return frozenset(range(len(names)) if words is None else (known[word] for word in words))


def _check_outputs(requests: Sequence[Request], infos: Sequence[RasterInfo], classes: int, mapper: Mapper) -> None:
    """Raise OutputError or ConfigError for outputs that cannot be written, or would replace an input."""
    outputs: list[Output] = []
    for request, info in zip(requests, infos, strict=True):
        outputs.append(raster_output("--output", request.output, info, 1, "uint8", request.packing, legend=True))
        if request.probabilities is not None:
            shares = info, classes, "float32", request.packing.of_shares()
            outputs.append(raster_output("--probabilities", request.probabilities, *shares))
        if request.polygons is not None:
            outputs.append(polygons_output("--polygons", request.polygons))
    read = (path for info in infos for path in (info.path, *info.files))
    area = requests[0].config.data.area
    check_outputs(outputs, [*read, *mapper.files, *requests[0].inputs, *([] if area is None else [area])])
    for output in outputs:
        if output.key != "--polygons" and requests[0].packing.format != ZARR:
            check_ending(output.key, str(output.path), *_RASTERS)
        check_unclaimed(output.path)


_OUTPUTS = ("output", "probabilities", "polygons")
_RASTERS = (".tif", ".tiff")


@contextmanager
def staged(requests: Sequence[Request], mesh: Mesh) -> Iterator[tuple[Sequence[Request], str | None]]:
    """Yield the requests, with outputs for servers moved to a new local folder, and that folder (None: no output is for
    a server). Collective.

    Raise OutputError, before any work, for a URL that names no object, or that the server does not let us write.
    """
    made: list[str] = []
    try:
        yield mesh.on_root(lambda: _stage(requests, made))
    finally:
        for folder in made:
            for root, _, _ in os.walk(folder, topdown=False):
                with suppress(OSError):  # it may hold a map that was not uploaded
                    os.rmdir(root)


def _stage(requests: Sequence[Request], made: list[str]) -> tuple[Sequence[Request], str | None]:
    images = {gdal_path(request.image) for request in requests}
    outputs = [{key: path for key in _OUTPUTS if (path := getattr(request, key)) is not None} for request in requests]
    names = {url: _checked(f"--{key}", url, images) for each in outputs for key, url in each.items() if is_remote(url)}
    if not names:
        return requests, None
    with doing("asking the server whether maps may be written"):
        for name in {os.path.dirname(name.url): name for name in names.values()}.values():
            tick()
            try:
                check_writable(name)
            except InputError as error:
                raise OutputError(str(error)) from error
        for name in names.values():
            if requests[0].packing.format == ZARR and is_there(name._replace(key=f"{name.key}/zarr.json")):
                raise OutputError(f"{name.url} is there; remove it, or name another")
            if name.key.lower().endswith(".gpkg") and is_there(name):
                raise OutputError(
                    f"--polygons {name.url} is there, and may hold other layers; remove it, or name another"
                )
    folder = tempfile.mkdtemp(prefix="tiledseg-")
    made.append(folder)
    local = []
    for request, each in zip(requests, outputs, strict=True):
        files = {key: os.path.join(folder, *names[url]) for key, url in each.items() if url in names}
        for file in files.values():
            os.makedirs(os.path.dirname(file), exist_ok=True)
        local.append(replace(request, **files))  # type: ignore[arg-type]
    return local, folder


def _checked(key: str, url: str, images: set[str]) -> RemoteName:
    """Return an output's bucket and key. Raise OutputError for a URL that cannot be written, or is an input."""
    name = parse_s3(url)
    if name is None:
        raise OutputError(f"{key} is {url}, which cannot be written; give a file, or s3:// with a name")
    if any(part in ("", ".", "..") for part in url.removeprefix("s3://").split("/")):
        raise OutputError(f"{key} is {url}, which names no object; give s3://bucket/name.tif")
    if gdal_path(url) in images:
        raise OutputError(f"cannot write {key} {url}: it is the input {url}; choose another output")
    require(f"{key} {url}", "s3", "obstore")
    return name


def upload(folder: str | None) -> tuple[str, ...]:
    """Upload the files in `folder`, on one rank, after a map is finished there. Return warnings.

    As with local files, an older map's sidecars are removed first, and an existing style stays. Raises WriteError if
    the server refuses; files that were not uploaded stay in the folder.
    """
    if folder is None:
        return ()
    notes: list[str] = []

    def order(file: Path) -> tuple[bool, int, Path]:  # rasters and metadata last
        last = file.suffix in _RASTERS or file.name == "zarr.json"
        return last, -len(file.parts) if last else 0, file

    files = sorted(files_below(folder), key=order)
    with doing("putting the map onto its server"):
        for file in files:
            bucket, *key = file.relative_to(folder).parts
            name = RemoteName(bucket, "/".join(key))
            try:
                tick()
                if file.suffix == ".qml" and is_there(name):
                    notes.append(f"the style {name.url} stays as it was; remove it for one of this map's classes")
                else:
                    for end in SIDECARS if file.suffix in _RASTERS else ():
                        if file.with_name(file.name + end) not in files:
                            remove(name._replace(key=name.key + end))
                    put(name, file, tick)
            except InputError as error:
                raise WriteError(f"{error}; files that were not uploaded are kept in {folder}") from error
            file.unlink()
    return tuple(notes)
