"""`tiledseg tile --images ... --labels ... --grid Q --output tiles.h5`, alone or under any launcher."""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.tile")

import argparse
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from typing import TYPE_CHECKING

from tiledseg.architecture.options import PADDINGS, UPSAMPLINGS
from tiledseg.architecture.presets import build_network
from tiledseg.comm.session import run_on_mesh
from tiledseg.comm.watching.doing import doing, tick
from tiledseg.commands.options import parse_config
from tiledseg.commands.parser import Parser, run, warn
from tiledseg.config.run import Config, TilingConfig
from tiledseg.errors import ConfigError
from tiledseg.geometry.halo import Footprint, network_footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.system.console import answer, counted
from tiledseg.system.outputs import check_outputs
from tiledseg.user_files.classes import parse_classes, read_classes

if TYPE_CHECKING:
    from tiledseg.comm.mesh import Mesh
    from tiledseg.raster.labels.pair_reading import PairReading
    from tiledseg.raster.tile_store.writer import StorePlan


def build_parser() -> Parser:
    """Return the command's parser. An option left out is that of --config, or of the default configuration."""
    parser = Parser(
        prog="tiledseg tile",
        description="Cut rasters into an HDF5 tile store: each context, halo included, in one piece.",
    )
    parser.add_argument("--images", nargs="+", help="images: paths, globs or URLs")
    parser.add_argument("--labels", nargs="+", help="their labels, in the same order")
    parser.add_argument("--grid", nargs="+", help="tiles along rows and columns: Q, or R C")
    parser.add_argument("--halo", help="pixels around a core, or auto (default): the smallest exact one")
    parser.add_argument("--output", required=True, help="the store to write, such as tiles.h5")
    parser.add_argument("--bands", help="band numbers to keep, from 1, such as [1,2,3,4] (default: all)")
    parser.add_argument("--nodata", type=float, help="value of pixels without data (default: what the raster says)")
    parser.add_argument(
        "--references", action="store_true", default=None, help="open formats that read further files and URLs (VRT)"
    )
    polygons = parser.add_argument_group("labels that are polygons, or lie on another grid (docs/own-data.md)")
    polygons.add_argument("--label-layer", metavar="NAME", help="of polygons: as train's data.label_layer")
    polygons.add_argument("--label-attribute", metavar="NAME", help="the same: what tells their class")
    polygons.add_argument("--background", metavar="CLASS", help="the same: the class of pixels in none, or ignored")
    polygons.add_argument("--classes", help="the same: as evaluate's --classes; rasters keep their values")
    polygons.add_argument(
        "--warp", action="store_true", default=None, help="bring labels of another grid to the image's"
    )
    parser.add_argument("--config", help="a run's YAML file: takes data, tiling and model from there")
    network = parser.add_argument_group("the network that the halo is for")
    network.add_argument("--levels", type=int)
    network.add_argument("--convs-per-level", type=int)
    network.add_argument("--kernel", type=int)
    network.add_argument("--padding", choices=PADDINGS)
    network.add_argument("--upsampling", choices=UPSAMPLINGS)
    parser.add_argument("--parallel.transport", dest="transport", default="auto", help="auto, nccl, gloo or mpi")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the store and return the exit code (0; 2 for bad input)."""

    def body() -> int:
        options = build_parser().parse_args(argv)
        config = resolve(options)

        def work(mesh: Mesh) -> None:
            inputs = [options.config] if options.config else []
            _work(config, options.output, inputs, options.classes is not None, mesh)

        return run_on_mesh(work, options.transport)

    return run(body)


def resolve(options: argparse.Namespace) -> Config:
    """Return the configuration of the flags and --config. Raises ConfigError."""
    config = parse_config(["--config", options.config], "tiledseg tile", "") if options.config else Config()
    for key in ("images", "labels", "nodata", "references", "label_layer", "label_attribute", "background", "warp"):
        if getattr(options, key) is not None:
            setattr(config.data, key, getattr(options, key))
    config.data.classes = (
        read_classes(config.data.classes) if options.classes is None else parse_classes(options.classes)
    )
    if options.bands is not None:
        config.data.bands = _numbers("--bands", options.bands)
    if options.grid is not None:
        text = " ".join(options.grid)
        config.tiling.grid = text if text == "auto" else _numbers("--grid", text)
    if options.halo is not None:
        config.tiling.halo = options.halo if options.halo == "auto" else _number("--halo", options.halo)
    for key in ("levels", "convs_per_level", "kernel", "padding", "upsampling"):
        if getattr(options, key) is not None:
            setattr(config.model, key, getattr(options, key))
    if isinstance(config.tiling.grid, list) and len(config.tiling.grid) == 1:
        config.tiling = TilingConfig(config.tiling.grid[0], config.tiling.halo)
    if config.tiling.grid_shape() is None:
        raise ConfigError("a tile store needs a grid, not auto; give --grid Q or --grid R C (plan proposes one)")
    config.data.check()
    config.tiling.check()
    return config


def _numbers(flag: str, text: str) -> list[int]:
    words = text.strip().strip("[]").replace(",", " ").split()
    if not words or not all(word.isdigit() for word in words):
        raise ConfigError(f"{flag} is '{text}'; give whole numbers")
    return [int(word) for word in words]


def _number(flag: str, text: str) -> int:
    numbers = _numbers(flag, text)
    if len(numbers) != 1:
        raise ConfigError(f"{flag} is '{text}'; give one whole number")
    return numbers[0]


def plan_store(config: Config, from_flags: bool = True, classes_given: bool = False) -> tuple[StorePlan, PairReading]:
    """Plan the store before a pixel is read, and return how pixels are read.

    `from_flags`: messages name flags, not keys. `classes_given`: a flag names the classes, so some label must need
    them. Raises an InputError.
    """
    from tiledseg.raster.finding.sources import as_list, find_sources, pair_sources
    from tiledseg.raster.labels.pair_reading import check_used
    from tiledseg.raster.names import is_vector
    from tiledseg.raster.tile_store.writer import StorePlan

    data, keys = config.data, ("--images", "--labels")
    found = find_sources(as_list(data.images), keys[0], references=data.references)
    if data.labels or any(source.labels for source in found):
        pairs = pair_sources(as_list(data.images), as_list(data.labels), keys, references=data.references)
        image_paths, label_paths = pairs
    else:
        image_paths, label_paths = tuple(source.path for source in found), ()
    reading = _reading(config, any(map(is_vector, label_paths)), from_flags)
    check_used(reading.labels, label_paths)
    if classes_given and not any(map(is_vector, label_paths)):
        raise ConfigError("--classes is given, but no labels are polygons, and rasters keep their values; leave it out")
    if data.warp and not label_paths:
        raise ConfigError(f"{'--warp' if from_flags else 'data.warp'} is given, but no labels are; leave it out")
    images, labels = reading.inspect(image_paths, label_paths)
    grid, footprint = config.tiling.grid_shape(), _footprint(config, images[0].bands)
    assert grid is not None, "the command asks for a grid before it plans"
    tilings = tuple(make_tiling(info.shape, grid, footprint) for info in images)
    return StorePlan(images, labels or None, tilings), reading


def _reading(config: Config, draws: bool, from_flags: bool) -> PairReading:
    """Return how images and labels are read. `draws`: polygons become class numbers; rasters keep their values."""
    from tiledseg.raster.labels.label_map import LabelMap
    from tiledseg.raster.labels.pair_reading import LabelReading, PairReading

    data = config.data
    label_map = LabelMap.from_config(data.classes, data.ignore_index) if draws else None  # type: ignore[arg-type]
    more = data.references, data.label_layer, data.label_attribute, data.background, data.warp
    labels = LabelReading(label_map, *more, key="--{}" if from_flags else "data.{}")
    return PairReading(data.bands, data.nodata, data.references, labels, data.warp_images)


def _footprint(config: Config, bands: int) -> Footprint:
    """Return the network's footprint, which does not depend on the number of classes."""
    from tiledseg.tracing.build import known

    network = known(build_network(config.model, bands, classes=2), config.model.freeze_norm)
    return network_footprint(network.graph(), config.tiling.halo_width(), config.parallel.exact)


def _work(config: Config, output: str, inputs: Sequence[str], classes_given: bool, mesh: Mesh) -> None:
    """Cut on rank 0: HDF5 files have one writer."""
    from tiledseg.raster.tile_store.writer import is_cut, store_output

    def cut() -> str:
        plan, reading = plan_store(config, not inputs, classes_given)
        check_outputs([store_output(output, plan)], [*plan.files, *inputs])
        there = is_cut(output, plan)
        if not there:
            _write(config, output, plan, reading)
        return _summary(output, plan, there)

    summary = mesh.on_root(cut)
    if mesh.is_root and config.run.verbosity:
        answer(summary)


def _write(config: Config, output: str, plan: StorePlan, reading: PairReading) -> None:
    from tiledseg.execution.progress import StepProgress
    from tiledseg.raster.finding.sources import as_list, left_out
    from tiledseg.raster.georeferencing import code_notes
    from tiledseg.raster.info import reference_notes
    from tiledseg.raster.tile_store.writer import write_store

    images, labels = plan.images, plan.labels or ()
    if config.run.verbosity:
        warn(left_out(as_list(config.data.images), "--images"))
        warn([*reference_notes((*images, *labels)), *code_notes(images)])
    with closing(StepProgress(plan.tiles, 0, config.run.verbosity)) as progress, doing("writing tiles"):
        done = count(1)

        def advance(image: int) -> None:
            tick()
            progress.advance(next(done), f"image {image}")

        write_store(
            output,
            plan,
            lambda number: reading.open_as(images[number].path, images[number]),
            lambda number: reading.labels.open(labels[number].path, images[number]),
            advance,
        )


def _summary(output: str, plan: StorePlan, there: bool) -> str:
    height, width = (max(tiling.context_max[dim] for tiling in plan.tilings) for dim in (0, 1))
    return (
        f"{output}: {counted(len(plan.images), 'image')}, {counted(plan.tiles, 'tile')} "
        f"({0 if there else plan.tiles} written now), contexts of up to {height} x {width} px, "
        f"{plan.bytes / 1e9:.2f} GB; use it as data.images"
    )
