"""`tiledseg predict --checkpoint RUN --image a.tif --output classes.tif`: maps rasters, under any launcher."""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.predict")

import json
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledseg.architecture.network import ForeignNetwork
from tiledseg.architecture.presets import CROPS, crop_grid
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.session import joined_mesh, run_on_mesh
from tiledseg.commands.options import add_keys, config_of, parse
from tiledseg.commands.parser import Parser, command, flag_of, refuse_given
from tiledseg.config.checks import AUTO, Range, checked
from tiledseg.config.map_formats import COMPRESSIONS, FORMATS, NO_VIEWS, VIEWS, Packing
from tiledseg.config.parallel import HOST, NONE
from tiledseg.config.run import Config
from tiledseg.errors import ConfigError, explained, renamed
from tiledseg.geometry.box import Box
from tiledseg.raster.array_names import array_of, takes_arrays
from tiledseg.system.console import say
from tiledseg.system.freed_memory import keep_freed_memory

if TYPE_CHECKING:
    from torch import nn
    from xarray import DataArray

    from tiledseg.comm.mesh import Mesh
    from tiledseg.inference.request import Request
    from tiledseg.inference.trained import Mapper, Trained
    from tiledseg.raster.info import RasterInfo
    from tiledseg.raster.statistics import Normalization


def build_parser() -> Parser:
    main = (
        "--checkpoint --image --output --probabilities --polygons --tta --area --build --window --config --tiling.grid"
    )
    main += " --parallel.halo --memory.blocks"
    parser = Parser(
        "tiledseg predict",
        "--checkpoint runs/run --image a.tif --output map.tif",
        description="Map a raster with a trained network.",
        main=main.split(),
    )
    add = parser.add_argument
    add("--checkpoint", type=str, help="a run's folder, or one checkpoint of it")
    add("--which", choices=("latest", "best"), help="checkpoint of a run (default: best with train.best, else latest)")
    add("--image", nargs="+", required=True, help="rasters to map: paths, folders, globs, lists or URLs")
    add("--output", type=str, required=True, help="GeoTIFF of class numbers to write, a folder, or s3://")
    add("--probabilities", type=str, help="GeoTIFF of class probabilities to write, one band a class")
    cog = "cog (default): Cloud-Optimized, with overviews; gtiff: tiled, as the ranks write it"
    add("--format", choices=FORMATS, default="cog", help=cog)
    add("--compress", choices=COMPRESSIONS, default=AUTO, help="compression (default auto: docs/how-to/maps.md)")
    add("--polygons", metavar="FILE.gpkg", help="GeoPackage of the classes' areas to write")
    names = "classes with polygons, by name or number (default: all)"
    add("--polygons-classes", type=str, metavar="CLASS[,CLASS]", help=names)
    views = "the mean over the raster and its reflections, or all quarter turns of these too (default none)"
    add("--tta", choices=VIEWS, default=NO_VIEWS, help=views)
    bands = "bands by mean and deviation of the training images (default), or by those of each mapped image"
    add("--normalize", choices=("training", "image"), default="training", help=bands)
    add("--weights", metavar="FILE", help="a network's state dict, in place of --checkpoint")
    add("--mean", type=json_list, metavar="[M,...]", help="with --weights: means taken off the bands")
    add("--deviation", type=json_list, metavar="[S,...]", help="with --weights: divisors of the bands")
    data = ["area", "references", "workers", "classes", "bands", "times", "assets", "mosaic", "valid", "valid_values"]
    plain = [*(f"data.{key}" for key in data), "train.precision", "run.verbosity"]
    plain += [f"model.{key}" for key in ("build", "arguments", "series", "verify", *CROPS)]
    add_keys(parser, plain, plain=True, area="polygons (GeoPackage, GeoJSON): map these only", **_OF_WEIGHTS)
    blocks = "blocks of a tile, one after the other: none (default), Q, [R, C] or auto"
    spread = ["exact", "halo", "mesh", "fusion", "overlap", "stages", "balance", "schedule", "idle_ranks", "transport"]
    keys = ["tiling.grid", *(f"parallel.{key}" for key in (*spread, "deadline", "machine"))]
    add_keys(parser, [*keys, "memory.blocks", "memory.store"], blocks=blocks)
    return parser


def json_list(text: str) -> list[float]:
    """Parse numbers such as [1,2,3]."""
    numbers = json.loads(text)
    if not isinstance(numbers, list) or not all(type(value) in (int, float) for value in numbers):
        raise ValueError(text)
    return numbers


_OF_WEIGHTS = {
    "series": "with --weights: the times that the module takes in a dim of their own (docs/how-to/own-network.md)",
    "times": "texts that {time} in --image stands for, or beginnings of items' datetimes (default: those of training)",
    "assets": "assets of a STAC item that are an image's bands (default: those of the training)",
    "mosaic": "the rasters of each entry of --image are one image, pieces of one grid (default: as in the training)",
    "valid": "pixels that a map has: a band's number, a pattern of rasters that are 0 elsewhere, or an asset "
    "(default: as in the training); none: all",
    "window": "side of crops, for a module of one input size, which is not traced (docs/how-to/maps.md)",
    "classes": "with --weights: the number of classes that the network tells apart",
    "arguments": 'with --weights: what --build is called with, as {"width": 16}',
    "bands": "with --weights: band numbers to read, from 1 (default: all but alpha)",
}


@command
def main(words: Sequence[str]) -> int:
    """Write the maps."""
    options = parse(build_parser(), words)
    config = parse_groups(options)
    check_own(options)
    keep_freed_memory(os.environ)
    typed = {key: flag for key, flag in options.flags.items() if options.weights or vars(options)[key] is not None}

    @renamed(typed)
    def work(mesh: Mesh) -> None:
        from tiledseg.execution.memory import memory_per_rank
        from tiledseg.inference.predictor import predict_all
        from tiledseg.inference.trained import checkpoint_mapper, find_named

        network_line = None
        if options.weights is None:
            checkpoint = mesh.on_root(lambda: find_named(options.checkpoint, config.model.build, options.which))
            mapper = checkpoint_mapper(checkpoint, crops=crop_grid(config.model))
            network_line, best = f"network: {checkpoint.path}", checkpoint.saved.best
            if options.which is None and best is not None and best.step == checkpoint.saved.step:
                network_line += f", the best by {best.score} ({best.value:.4f}); --which latest takes the newest"
        else:
            mapper = _mapper_of_weights(options, config, mesh)
        predict_all(_requests(options, config, mapper, mesh), mapper, memory_per_rank(mesh), mesh, network_line)

    return run_on_mesh(work, config.parallel.transport, config.parallel.deadline)


def parse_groups(options: Namespace) -> Config:
    """Return the configuration from the options that are its keys. Raise ConfigError."""
    if options.polygons is None:
        refuse_given(options, ("polygons_classes",), "--polygons is not given", "give it")
    config = config_of(options, memory={"blocks": NONE})
    with renamed(options.flags):
        for group in (config.tiling, config.parallel, config.memory, config.model):
            group.check()
    config.memory.check_folder()
    return config


def check_own(options: Namespace) -> None:
    """Raise ConfigError unless the options name either a checkpoint, or --build with --weights."""
    typed = {name: value for name, value in vars(options).items() if value is not None}
    weights = typed.get("weights")
    if ("checkpoint" in typed) == (weights is not None):
        raise ConfigError("give --checkpoint RUN, or --build and --weights FILE: one of the two")
    if typed.get("model.verify") is False and "model.build" not in typed:
        raise ConfigError("--no-verify is given, but no --build: the network is one of ours; leave it out")
    if weights is None:
        own = ("data.classes", "model.arguments", "model.series", "data.bands", "mean", "deviation")
        refuse_given(options, own, "the checkpoint has its own")
        return
    for name in ("model.build", "data.classes"):
        if name not in typed:
            raise ConfigError(f"--weights is {weights}, but {flag_of(name)} is not given; give it")
    if ("mean" in typed) != ("deviation" in typed):
        raise ConfigError("--mean and --deviation go together; give both or neither")
    refuse_given(options, ("which",), "--weights is one file and no run")


def mapper_of(
    make: Callable[[int], nn.Module],
    images: Sequence[str],
    key: str,
    config: Config,
    normalize: Any,
    classes: int | None,
    mesh: Mesh,
) -> Mapper:
    """Return the mapper of the module that `make` gives for the number of bands of the first image, whose name is an
    argument `key`. Collective."""
    from tiledseg.inference.trained import module_mapper
    from tiledseg.raster.finding import expand_sources
    from tiledseg.raster.lists import EVERY, SourceRules
    from tiledseg.raster.reader import open_raster
    from tiledseg.raster.statistics import given_normalization

    data = config.data

    def read() -> RasterInfo:
        rules = SourceRules(*data.composing, EVERY).like(SourceRules(), images)
        first = expand_sources(data.joined(list(images), key), key, rules)[0]
        with open_raster(first, data.bands, None, data.references) as reader:
            return reader.info

    def made() -> Mapper:
        normalization = given_normalization(normalize, info.bands)
        whole = mesh.size == 1 and config.tiling.grid_shape() == (1, 1)
        module, crops = make(info.bands), crop_grid(config.model)
        return module_mapper(module, info.bands, data.bands, classes, normalization, crops, whole)

    info = mesh.on_root(read)
    with explained(info.notes):
        return mesh.on_all(made)


def _mapper_of_weights(options: Namespace, config: Config, mesh: Mesh) -> Mapper:
    from tiledseg.inference.trained import fill
    from tiledseg.tracing.build import built_module

    model: Any = config.model
    classes: Any = config.data.classes

    def make(bands: int) -> nn.Module:
        Range(2, 255).check("--classes", classes)
        network = ForeignNetwork.of(model.build, model.arguments, bands, classes, crop_grid(model), model.series)
        module = built_module(network, 0)
        fill(module, options.weights)
        return module

    pair = None if options.mean is None else (options.mean, options.deviation)
    mapper = mapper_of(make, options.image, "--image", config, pair, classes, mesh)
    return replace(mapper, files=(options.weights,))


def _requests(options: Namespace, config: Config, mapper: Mapper, mesh: Mesh) -> list[Request]:
    """Return a request for the map of each image. Collective."""
    from tiledseg.inference.request import Request, each_image
    from tiledseg.planning.run.blocks import BlockSettings
    from tiledseg.planning.run.spread import parallelism
    from tiledseg.raster.lists import SourceRules

    memory, parallel = config.memory, parallelism(config.parallel)
    if parallel.mesh is None and parallel.stages == 1:  # small images may leave ranks of an automatic mesh idle
        parallel = replace(parallel, idle_ranks=True)
    request = Request(
        image="",
        output="",
        grid=config.tiling.grid_shape(),
        precision=config.train.precision,
        parallel=parallel,
        machine=config.parallel.machine,
        references=config.data.references,
        packing=Packing(options.format, options.compress),
        polygons_classes=options.polygons_classes and tuple(options.polygons_classes.split(",")),
        area=config.data.area,
        views=options.tta,
        normalize=options.normalize,
        blocks=None if memory.blocks == NONE else BlockSettings(memory.blocks_shape(), memory.in_file),
        store=memory.store,
        verify=config.model.verify,
        composing=SourceRules(*config.data.composing)._replace(mosaic=vars(options)["data.mosaic"]),
        inputs=tuple(options.config),
        threads=config.data.workers,
        verbosity=config.run.verbosity,
    )
    targets = {name: getattr(options, name) for name in ("output", "probabilities", "polygons")}
    return mesh.on_root(lambda: each_image(request, options.image, targets, mapper.composing))


_OF_COMMAND = ("checkpoint", "which", "weights", "mean", "deviation", "build", "arguments", "series")


@takes_arrays
@renamed({f"data.{key}": key for key in ("bands", "assets", "mosaic", "valid", "valid_values", "times", "area")})
@checked
def predict_raster(
    network: nn.Module | Trained | str | Path,
    source: str | Path | Sequence[str | Path],
    target: str | Path | None = None,
    *,
    grid: int | tuple[int, int] | str = "auto",
    bands: Sequence[int] | None = None,
    normalize: Normalization | tuple[Sequence[float], Sequence[float]] | None = None,
    classes: int | None = None,
    probabilities: str | Path | None = None,
    memory: Mapping[str, Any] | None = None,
    parallel: Mapping[str, Any] | None = None,
    **flags: Any,
) -> DataArray | None:
    """Write the exact class map of `source` to `target` like `tiledseg predict`, on any number of ranks. Collective.
    Several sources get a map each, in the folder `target`. `source` may be an xarray.DataArray with x and y; without a
    `target` its map is returned as one (made in TMPDIR, which all nodes must share).

    `network`: a module or a result of `load` with its current weights, or a run's folder or checkpoint. From a folder,
    the best checkpoint maps, if one is kept. A network trained here brings the following settings with it. A module
    maps in evaluation mode, with one channel of its (first) output for each class. It takes `bands` (numbers from 1;
    None: all but alpha) in float32, 0 where they are not valid. `normalize`: (means, deviations) or a `Normalization`;
    None: values unchanged. `classes`: the expected number of classes.

    `flags`: any other flag of `tiledseg predict --help all`, with `_` for `-`: `precision="bf16"`, `format="gtiff"`,
    `area="a.gpkg"`, `verbosity=0`, `polygons_classes=["road"]`. `verify=False`: do not compare a module first with its
    traced network (docs/explanation/exactness.md). `window`, `overlap`, `blend`, `ends`: a module of this input size
    maps by crops (docs/how-to/maps.md), untraced. A module also need not be traced with grid 1 on one rank. `memory`,
    `parallel`: maps of a group's keys, such as {"blocks": 8, "store": "/scratch"}, {"halo": "layer", "mesh": [2, 2]}.

    If a norm or a mean sees the whole image, one rank computes each layer in blocks, as many as `grid` has tiles (auto:
    the fewest that fit), kept in memory or in a file of `memory`'s `store`. Several ranks compute each layer together.
    A rank needs memory for its part, or for `memory`'s `blocks` of its part.

    Raises InputError before anything is written.
    """
    from tiledseg.execution.memory import memory_per_rank
    from tiledseg.inference.predictor import predict_all

    images = [str(one) for one in ([source] if isinstance(source, (str, Path)) else source)]
    array = array_of(images[0]) if target is None and len(images) == 1 else None
    if array is not None:
        target, flags = "map.tif", flags | {"format": "gtiff", "compress": "none"}  # in a temporary folder
    elif target is None:
        raise ConfigError("target is None, but source is no xarray.DataArray; give the path of the map")
    refused = [name for name in _OF_COMMAND if flags.get(name) is not None]
    if refused:
        raise ConfigError(f"{refused[0]} is given, but network is the network; leave it out (tiledseg.predict_raster)")
    if not isinstance(named := flags.get("polygons_classes", ""), str):
        flags["polygons_classes"] = None if named is None else ",".join(map(str, named))
    more = {
        "tiling": {"grid": list(grid) if isinstance(grid, tuple) else grid},
        "memory": {"blocks": "auto", **memory} if memory and "store" in memory else memory,
        "parallel": parallel,
    }
    files = {"image": images, "output": target, "probabilities": probabilities}
    options = parse(build_parser(), (), {**flags, **files, **more})
    refuse_given(options, ("parallel.transport", "parallel.deadline"), "the program's own process group has these")
    config = parse_groups(options)
    of_module = {"bands": bands, "normalize": normalize, "classes": classes}
    with joined_mesh() as mesh:
        mapper = _mapper(network, images, config, of_module, mesh)
        requests = _requests(options, config, mapper, mesh)
        if "halo" not in (parallel or {}) and config.parallel.exact:
            requests = mesh.on_root(lambda: _exactly(requests, mapper, mesh.size))
        if array is None:
            predict_all(requests, mapper, memory_per_rank(mesh), mesh)
            return None
        folder = mesh.on_root(lambda: tempfile.mkdtemp(prefix="tiledseg-"))
        try:
            path = f"{folder}/{target}"
            predict_all([replace(requests[0], output=path)], mapper, memory_per_rank(mesh), mesh, ends=False)
            result = mesh.on_all(lambda: _as_array(array, path))
            mesh.communicator.barrier()
            return result
        finally:
            if mesh.is_root:
                shutil.rmtree(folder, ignore_errors=True)


def _as_array(source: Any, path: str) -> Any:
    """Return the class map at `path` as an array with the place of `source`, a DataArray."""
    from tiledseg.raster.array_place import dims_of, flags
    from tiledseg.raster.reader import open_raster

    dims = dims_of(source) or ()
    place = source.isel({dim: 0 for dim in source.dims if dim not in dims}, drop=True).transpose(*dims)
    with open_raster(path) as reader:
        pixels_CHW, info = reader.read(Box.of_shape(reader.info.shape))[0], reader.info
    mapping = {name: source.attrs[name] for name in ("grid_mapping", "crs", "transform") if name in source.attrs}
    legend = flags([name for _, name in info.class_names])
    named = place.copy(data=pixels_CHW[0]).drop_encoding().rename("classes")
    return named.drop_attrs(deep=False).assign_attrs(
        **mapping, **legend, _FillValue=pixels_CHW.dtype.type(info.nodata or 0)
    )


def _exactly(requests: Sequence[Request], mapper: Mapper, ranks: int) -> list[Request]:
    """Return requests that are exact for norms and means over the whole image: in mode `layer`, or on one rank in
    blocks of the whole image, as many as the grid has tiles."""
    from tiledseg.planning.run.blocks import BlockSettings, seen_whole
    from tiledseg.planning.run.spread import measuring

    graph, first = mapper.describe().graph(), requests[0]
    whole, grid, parallel = seen_whole(graph), first.grid, first.parallel
    mode = "layer" if grid != (1, 1) and measuring(graph, trains=False) else "read"
    if mode != "read" and ranks == 1 and whole is not None and grid is not None and first.verbosity:
        say(f"warning: grid is not used: '{whole}' needs the whole image at once; start several ranks")
    if mode == "read" or ranks > 1 or whole is not None or (first.blocks is not None and first.blocks.shape):
        return [replace(one, parallel=replace(parallel, halo=mode)) for one in requests]
    blocks = BlockSettings(grid, first.store != HOST, if_needed=grid is None and first.blocks is None)
    return [replace(one, grid=None, blocks=blocks) for one in requests]


def _mapper(network: Any, images: Sequence[str], config: Config, of_module: Mapping[str, Any], mesh: Mesh) -> Mapper:
    """Return the mapper of a network; `of_module`: the arguments that serve a module alone. Collective."""
    from torch import nn

    from tiledseg.inference.trained import Trained, checkpoint_mapper, find_named

    if not isinstance(network, nn.Module | Trained | str | Path):
        raise mark_agreed(ConfigError(f"the network is {network!r}; give a module, a result of load, or a path"))
    if isinstance(network, nn.Module):
        config.data.bands, normalize, classes = of_module.values()
        return mapper_of(lambda _: network, images, "source", config, normalize, classes, mesh)
    known = next((key for key, value in of_module.items() if value is not None), None)
    if known is not None:
        raise mark_agreed(ConfigError(f"{known} is given, but the trained network has its own; leave it out"))
    crops = crop_grid(config.model)
    if isinstance(network, Trained):
        return checkpoint_mapper(network.checkpoint, network.network.state_dict(), crops)
    return checkpoint_mapper(mesh.on_root(lambda: find_named(network)), crops=crops)
