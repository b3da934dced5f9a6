"""`tiledseg predict --checkpoint RUN --image a.tif --output classes.tif`: maps rasters, under any launcher."""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.predict")

import json
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tiledseg.architecture.network import ForeignNetwork
from tiledseg.architecture.presets import CROPS, crop_grid
from tiledseg.comm.session import run_on_mesh
from tiledseg.commands.options import add_keys, config_of, parse
from tiledseg.commands.parser import Parser, command, flag_of, refuse_given
from tiledseg.config.checks import AUTO, Range
from tiledseg.config.map_formats import COMPRESSIONS, FORMATS, NO_VIEWS, VIEWS, Packing
from tiledseg.config.parallel import NONE
from tiledseg.config.run import Config
from tiledseg.errors import ConfigError, explained, renamed
from tiledseg.system.freed_memory import keep_freed_memory

if TYPE_CHECKING:
    from torch import nn

    from tiledseg.comm.mesh import Mesh
    from tiledseg.inference.request import Request
    from tiledseg.inference.trained import Mapper
    from tiledseg.raster.info import RasterInfo


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
        _work(options, config, mesh)

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


def request_of(options: Namespace, config: Config) -> Request:
    """Return the request of a map, without image and output."""
    from tiledseg.inference.request import Request
    from tiledseg.planning.run.blocks import BlockSettings
    from tiledseg.planning.run.spread import parallelism
    from tiledseg.raster.lists import SourceRules

    memory, parallel = config.memory, parallelism(config.parallel)
    if parallel.mesh is None and parallel.stages == 1:  # small images may leave ranks of an automatic mesh idle
        parallel = replace(parallel, idle_ranks=True)
    return Request(
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


def _work(options: Namespace, config: Config, mesh: Mesh) -> None:
    from tiledseg.execution.memory import memory_per_rank
    from tiledseg.inference.predictor import predict_all
    from tiledseg.inference.request import each_image
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
    request = request_of(options, config)
    targets = {name: getattr(options, name) for name in ("output", "probabilities", "polygons")}
    requests = mesh.on_root(lambda: each_image(request, options.image, targets, mapper.composing))
    predict_all(requests, mapper, memory_per_rank(mesh), mesh, network_line)
