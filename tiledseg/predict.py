"""`tiledseg predict --checkpoint RUN --image a.tif --output classes.tif`, alone or under any launcher."""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.predict")

import os
import re
import sys
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tiledseg.architecture.foreign import ForeignNetwork
from tiledseg.comm.failure import traced
from tiledseg.comm.session import run_on_mesh
from tiledseg.commands.config_flags import parse
from tiledseg.commands.parser import Parser, json_list, json_map, run
from tiledseg.config.checks import Range
from tiledseg.config.map_formats import AUTO, COMPRESSIONS, FORMATS, PROBABILITY_TYPES, Packing, check_files
from tiledseg.config.memory import NONE
from tiledseg.config.run import Config, MemoryConfig, ParallelConfig
from tiledseg.errors import ConfigError
from tiledseg.system.freed_memory import keep_freed_memory
from tiledseg.units.widths import ACTIVATION_BYTES

if TYPE_CHECKING:
    from tiledseg.checkpoint.folder import Checkpoint
    from tiledseg.comm.mesh import Mesh
    from tiledseg.planning.run.parallelism import Parallelism
    from tiledseg.raster.statistics import Normalization

GROUPED = (
    "tiling.grid",
    *(f"parallel.{key}" for key in ("exact", "halo", "mesh", "fusion", "overlap", "stages", "balance", "schedule")),
    *(f"parallel.{key}" for key in ("idle_ranks", "transport", "deadline", "machine")),
    "memory.blocks",
    "memory.store",
)
"""The keys of a run's configuration that a map has too."""
_OTHERWISE = {"memory.blocks": "default none", "parallel.deadline": "default 600"}
_DEADLINE = 600.0  # seconds
_PLAIN_LIST = re.compile(r"\d+(\s*,\s*\d+)+")


def build_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(prog="tiledseg predict", description="Map a raster with a trained network.")
    parser.add_argument("--checkpoint", type=str, help="a run's folder, or one checkpoint of it")
    parser.add_argument(
        "--which",
        choices=("latest", "best"),
        help="of a run's checkpoints (default: the best where train.best keeps one, else the latest)",
    )
    parser.add_argument(
        "--image",
        nargs="+",
        required=True,
        help="rasters to map: paths, folders, globs, lists or URLs; of several, each output is a folder",
    )
    parser.add_argument(
        "--output", type=str, required=True, help="GeoTIFF of class numbers to write, a folder, s3:// or https://"
    )
    parser.add_argument("--probabilities", type=str, help="GeoTIFF of class probabilities to write, one band a class")
    parser.add_argument(
        "--probability-type",
        choices=PROBABILITY_TYPES,
        help="float32 (default), or uint8: whole numbers of 1/254",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="cog",
        help="cog (default): Cloud-Optimized, with overviews; gtiff: tiled, without (docs/maps.md)",
    )
    parser.add_argument(
        "--compress", choices=COMPRESSIONS, default=AUTO, help="of the maps (default auto: see docs/maps.md)"
    )
    parser.add_argument("--polygons", metavar="FILE.gpkg", help="GeoPackage of the classes' areas to write")
    parser.add_argument(
        "--polygons-minimum-area",
        dest="minimum_area",
        metavar="AREA",
        help="leave out smaller ones: as 50, in square units of the CRS, or 12px",
    )
    parser.add_argument(
        "--polygons-classes",
        type=str,
        metavar="CLASS[,CLASS]",
        help="classes that have polygons, by name or number (default: all)",
    )
    parser.add_argument("--area", metavar="FILE", help="polygons (GeoPackage, GeoJSON): map these only")
    own = parser.add_argument_group("a network of your own (docs/own-network.md)")
    own.add_argument(
        "--build", metavar="PACKAGE.MODULE:FUNCTION", help="the code that builds the network; it is imported and run"
    )
    own.add_argument("--weights", metavar="FILE", help="its state dict, .safetensors or .pth, in place of --checkpoint")
    own.add_argument("--classes", type=int, metavar="K", help="with --weights: the classes that it tells apart")
    own.add_argument("--arguments", type=json_map, metavar="MAP", help='with --weights: as {"width": 16}')
    own.add_argument("--bands", type=json_list, metavar="[1,2,3]", help="with --weights: bands to read (default: all)")
    own.add_argument("--mean", type=json_list, metavar="[M,...]", help="with --weights: what is taken off each band")
    own.add_argument("--deviation", type=json_list, metavar="[S,...]", help="with --weights: what it is divided by")
    own.add_argument(
        "--verify",
        action=BooleanOptionalAction,
        default=True,
        help="first compare what was traced with the module, on a tile (default: yes)",
    )
    parser.add_argument(
        "--tta",
        choices=("none", "reflections", "turns"),
        default="none",
        help="the mean over the raster and its reflections, or all quarter turns of these too (default none)",
    )
    parser.add_argument(
        "--normalize",
        choices=("training", "image"),
        default="training",
        help="bands by mean and deviation of the training images (default), or by those of each image that is mapped",
    )
    parser.add_argument("--precision", choices=tuple(ACTIVATION_BYTES), default="fp32", help="default fp32")
    parser.add_argument(
        "--references",
        action=BooleanOptionalAction,
        default=False,
        help="open formats that read further files and URLs (VRT)",
    )
    parser.add_argument("--workers", type=int, default=2, help="reading threads a rank (default 2)")
    parser.add_argument("--verbosity", type=int, choices=(0, 1, 2), default=1, help="default 1")
    shared = parser.add_argument_group("keys of a run's configuration, as in tiledseg train --help")
    for name in GROUPED:
        shared.add_argument(f"--{name}", metavar="VALUE", help=_OTHERWISE.get(name))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the map and return the exit code (0; 2 for bad input)."""

    def body() -> int:
        options = parse(build_parser(), sys.argv[1:] if argv is None else argv)
        config = parse_groups(options)
        Range(1, 256).check("--workers", options.workers)
        check_own(options)
        check_files(vars(options), _flag)
        keep_freed_memory(os.environ)

        def work(mesh: Mesh) -> None:
            with traced(options.verbosity == 2):
                _work(options, config, mesh)

        return run_on_mesh(work, config.parallel.transport, config.parallel.deadline or _DEADLINE)

    return run(body)


def parse_groups(options: Namespace) -> Config:
    """Return the configuration of the options `group.key`, read and checked as those of train. Raises ConfigError."""
    given = {name: vars(options)[name] for name in GROUPED if vars(options)[name] is not None}
    config = Config(memory=MemoryConfig(blocks=NONE))
    if given:
        from tiledseg.commands.config_file import parse_config

        pairs = ({"memory.blocks": NONE} | given).items()
        words = [
            f"--{name}=[{value}]" if _PLAIN_LIST.fullmatch(value) else f"--{name}={value}" for name, value in pairs
        ]
        config = parse_config(words, "tiledseg predict", "")
    if config.memory.in_file and config.memory.blocks == NONE:
        raise ConfigError(
            f"--memory.store is {config.memory.store}, but --memory.blocks is none: nothing would lie there; give "
            "--memory.blocks too, auto say, or leave --memory.store out"
        )
    for group in (config.tiling, config.parallel, config.memory):
        group.check()
    config.memory.check_folder()
    return config


def _flag(name: str) -> str:
    """Return the flag of an option."""
    return "--" + {"minimum_area": "polygons-minimum-area"}.get(name, name.replace("_", "-"))


def check_own(options: Namespace) -> None:
    """Raise ConfigError unless the network is that of a checkpoint, or a function's with weights of a file."""
    if (options.checkpoint is None) == (options.weights is None):
        raise ConfigError("give --checkpoint RUN, or --build and --weights FILE: one of the two")
    if not options.verify and options.build is None:
        raise ConfigError("--no-verify is given, but no --build: the network is one of ours; leave it out")
    needed = {name: getattr(options, name) for name in ("build", "classes")}
    more = {name: getattr(options, name) for name in ("classes", "arguments", "bands", "mean", "deviation")}
    if options.weights is not None:
        missing = next((name for name, value in needed.items() if value is None), None)
        if missing is not None:
            raise ConfigError(f"--weights is {options.weights}, but --{missing} is not given; give it")
        if (options.mean is None) != (options.deviation is None):
            raise ConfigError("--mean and --deviation go together; give both or neither")
        if options.which is not None:
            raise ConfigError(f"--which is {options.which}, but --weights is one file and no run; leave it out")
        return
    given = next((name for name, value in more.items() if value is not None), None)
    if given is not None:
        raise ConfigError(f"--{given} is {more[given]}, which the checkpoint has; leave it out")


def _own(options: Namespace) -> tuple[ForeignNetwork, Normalization]:
    from tiledseg.raster.finding.sources import EVERY, expand_sources
    from tiledseg.raster.reading.reader import open_raster
    from tiledseg.raster.statistics import given_normalization

    Range(2, 255).check("--classes", options.classes)
    first = expand_sources(options.image, "--image", EVERY, options.references)[0]
    with open_raster(first, options.bands, None, options.references) as reader:
        bands = reader.info.bands
    pair = None if options.mean is None else (options.mean, options.deviation)
    network = ForeignNetwork.of(options.build, options.arguments or {}, bands, options.classes)
    return network, given_normalization(pair, bands)


def best_note(checkpoint: Checkpoint, options: Namespace) -> str:
    """Return words on a checkpoint that is the best, and was not asked for."""
    best = checkpoint.saved.best
    if options.which is not None or best is None or best.step != checkpoint.saved.step:
        return ""
    return f", the best by {best.score} ({best.value:.4f}); --which latest takes the newest"


def targets(options: Namespace) -> dict[str, str | None]:
    """Return the output of each kind, as typed."""
    return {name: getattr(options, name) for name in ("output", "probabilities", "polygons")}


def _parallelism(parallel: ParallelConfig) -> Parallelism:
    """Return the parallelism. A mesh of auto may leave ranks idle, as some images are small."""
    from tiledseg.planning.run.parallelism import parallelism

    asked = parallelism(parallel)
    return replace(asked, idle_ranks=True) if asked.mesh is None and asked.stages == 1 else asked


def _work(options: Namespace, config: Config, mesh: Mesh) -> None:
    from tiledseg.execution.memory import memory_per_rank
    from tiledseg.inference.mapper import checkpoint_mapper, weights_mapper
    from tiledseg.inference.predictor import predict_all
    from tiledseg.inference.request import Request, each_image
    from tiledseg.inference.trained import find_named
    from tiledseg.planning.run.blocks import BlocksAsked

    taken, memory = None, config.memory
    if options.weights is None:
        checkpoint = mesh.on_root(lambda: find_named(options.checkpoint, options.build, options.which))
        mapper = checkpoint_mapper(checkpoint)
        taken = f"network: {checkpoint.path}{best_note(checkpoint, options)}"
    else:
        network, normalization = mesh.on_root(lambda: _own(options))
        mapper = weights_mapper(network, options.weights, options.bands, normalization)
    request = Request(
        image="",
        output="",
        grid=config.tiling.grid_shape(),
        precision=options.precision,
        parallel=_parallelism(config.parallel),
        machine=config.parallel.machine,
        references=options.references,
        packing=Packing(options.format, options.compress),
        probability_type=options.probability_type or "float32",
        minimum_area=options.minimum_area,
        polygons_classes=options.polygons_classes and tuple(options.polygons_classes.split(",")),
        area=options.area,
        views=options.tta,
        normalize=options.normalize,
        blocks=None if memory.blocks == NONE else BlocksAsked(memory.blocks_shape(), memory.in_file),
        store=memory.store,
        verify=options.verify,
        inputs=tuple(options.config),
        threads=options.workers,
        prefetch=options.workers,
        verbosity=options.verbosity,
    )
    requests = mesh.on_root(lambda: each_image(request, options.image, targets(options)))
    predict_all(requests, mapper, memory_per_rank(mesh), mesh, taken)
