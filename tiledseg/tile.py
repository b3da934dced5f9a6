"""`tiledseg tile --images ... --labels ... --grid Q --output tiles.h5`: cuts rasters into a store of tiles."""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.tile")

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING

from tiledseg.architecture.presets import build_network
from tiledseg.comm.doing import doing, tick
from tiledseg.comm.session import run_on_mesh
from tiledseg.commands.options import add_keys, config_of, parse_config
from tiledseg.commands.parser import Parser, command, refuse_given, warn
from tiledseg.config.run import Config
from tiledseg.config.words import ZARR
from tiledseg.errors import ConfigError, OutputError, RasterError, renamed
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.raster.labels.classes import read_classes
from tiledseg.system.console import answer, counted
from tiledseg.system.files import writing
from tiledseg.system.outputs import check_outputs, unfinished, whole
from tiledseg.units import size

if TYPE_CHECKING:
    from tiledseg.comm.mesh import Mesh
    from tiledseg.raster.labels.pair_reading import PairReading
    from tiledseg.raster.mirrored_reader import RasterReader
    from tiledseg.raster.tile_store import Opener, StorePlan


HDF5 = "hdf5"


def build_parser() -> Parser:
    """Return the command's parser. The default of an option is that of --config, or of the configuration."""
    parser = Parser(
        "tiledseg tile",
        "--images a.tif --labels b.tif --grid 4 --output tiles.h5",
        description="Cut rasters into a store of tiles with their halos.",
    )
    own = {"images": "images: paths, globs or URLs", "labels": "their labels, in the same order"}
    for name, words in own.items():
        parser.add_argument(f"--{name}", dest=f"data.{name}", metavar=name.upper(), nargs="+", help=words)
    grid = "tiles along rows and columns: Q, or R C"
    parser.add_argument("--grid", dest="tiling.grid", metavar="GRID", nargs="+", help=grid)
    parser.add_argument("--output", required=True, help="the store to write, such as tiles.h5")
    kinds = "hdf5 (default), or zarr: rasters without halos, a chunk a tile, which the ranks write together"
    parser.add_argument("--format", choices=(HDF5, ZARR), default=HDF5, help=kinds)
    parser.add_argument("--config", help="a run's YAML file: takes data, tiling and model from there")
    data = ["bands", "nodata", "references", "label_layer", "label_attribute", "background", "classes", "warp", "times"]
    data += ["assets", "mosaic", "valid", "valid_values"]
    model = ["levels", "convs_per_level", "kernel", "padding", "upsampling"]
    plain = [*(f"data.{key}" for key in data), "tiling.halo", *(f"model.{key}" for key in model)]
    add_keys(parser, plain, plain=True, classes="classes of polygons: as train's; rasters keep their values")
    parser.get_default("flags").update({"data.images": "--images", "data.labels": "--labels", "tiling.grid": "--grid"})
    add_keys(parser, ("parallel.transport",))
    return parser


@command
def main(words: Sequence[str]) -> int:
    """Write the store."""
    options = build_parser().parse_args(words)
    given = {key for key, value in vars(options).items() if value is not None or not options.config}
    flags = {key: flag for key, flag in options.flags.items() if key in given}
    with renamed(flags):
        config = resolve(options)
    _check_output(options)

    @renamed(flags)
    def work(mesh: Mesh) -> None:
        inputs = [options.config] if options.config else []
        cut(config, options.output, inputs, vars(options)["data.classes"] is not None, mesh, options.format)

    return run_on_mesh(work, config.parallel.transport)


def _check_output(options: argparse.Namespace) -> None:
    """Raise ConfigError for a name that does not fit the format, or options that the format does not take."""
    from tiledseg.raster.remote import is_remote

    if is_remote(options.output):
        raise ConfigError(
            f"--output is {options.output}, but stores are written locally; give a local path, and copy the store"
        )
    if options.format == ZARR:
        halo = ["tiling.halo", *(key for key in options.flags if key.startswith("model."))]
        refuse_given(options, halo, "--format zarr keeps no halos")
        from tiledseg.raster.zarr_writer import check_zarr

        check_zarr("--output", options.output)
    elif options.output.rstrip("/").lower().endswith(".zarr"):
        raise ConfigError(f"--output is '{options.output}'; give --format zarr too, or a name such as tiles.h5")


def resolve(options: argparse.Namespace) -> Config:
    """Return the configuration of the flags and --config. Raises ConfigError."""
    base = parse_config(["--config", options.config], "tiledseg tile", "") if options.config else Config()
    given = vars(options)
    if words := given["tiling.grid"]:
        text = " ".join(words)
        given["tiling.grid"] = text if len(words) == 1 or text[0] == "[" else f"[{','.join(words)}]"
    config = config_of(options, **asdict(base))
    config.data.classes = read_classes(config.data.classes)
    if config.tiling.grid_shape() is None:
        raise ConfigError("a tile store needs a grid, not auto; give --grid Q or --grid R C (see tiledseg plan)")
    config.data.check()
    config.tiling.check()
    return config


def cut(config: Config, output: str, inputs: Sequence[str], classes_given: bool, mesh: Mesh, kind: str = HDF5) -> None:
    """Cut the store. Rank 0 writes HDF5, whose files have one writer; of Zarr each rank writes its own chunks.
    `classes_given`: a flag names the classes, so some labels must be polygons. Collective."""
    plan, reading, (images, labels) = mesh.on_root(lambda: _planned(config, output, inputs, classes_given, kind))

    def image(number: int) -> RasterReader:
        return reading.open_image(images[number])

    def label(number: int) -> RasterReader:
        return reading.open_labels(labels[number], plan.images[number])

    with doing("writing tiles"):
        if kind == ZARR:
            _write_zarr(output, plan, image, label, mesh)
        else:
            mesh.on_root(lambda: _write_hdf5(output, plan, image, label, config.run.verbosity))
    if mesh.is_root and config.run.verbosity:
        tiles = counted(sum(map(len, plan.tilings)), "tile")
        answer(f"{output}: {counted(len(plan.images), 'image')}, {tiles}, {size(plan.bytes)}")


def _planned(
    config: Config, output: str, inputs: Sequence[str], classes_given: bool, kind: str
) -> tuple[StorePlan, PairReading, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Plan the store from the headers of the files, and print warnings. Return the plan, the reading of the pixels
    (polygons become class numbers, rasters keep their values), and the paths of images and labels. Raise an InputError,
    also if the output exists, or would replace an input."""
    from tiledseg.raster.finding import as_list, check_assets, expand_sources, find_sources, pair_sources
    from tiledseg.raster.info import code_notes, reference_notes
    from tiledseg.raster.labels.label_map import LabelMap
    from tiledseg.raster.labels.pair_reading import PairReading
    from tiledseg.raster.lists import SourceRules, left_out
    from tiledseg.raster.remote import is_vector
    from tiledseg.raster.tile_store import StorePlan
    from tiledseg.tracing.build import known

    data, keys = config.data, ("--images", "--labels")
    typed, rules = data.joined(data.images, keys[0]), SourceRules(*data.composing)
    if data.labels or any(source.labels for source in find_sources(typed, keys[0], rules)):
        images, labels = pair_sources(typed, as_list(data.labels), keys, rules)
    else:
        images, labels = expand_sources(typed, keys[0], rules), ()
    check_assets(data.assets, images)
    draws = any(map(is_vector, labels))
    label_map = LabelMap.from_config(data.classes, data.ignore_index) if draws else None  # type: ignore[arg-type]
    reading = PairReading(label_map, **data.reading)
    reading.check_used(labels)
    if classes_given and not draws:
        raise ConfigError("--classes is given, but no labels are polygons, and rasters keep their values; leave it out")
    if data.warp and not labels:
        raise ConfigError("data.warp is given, but no labels; leave it out")
    infos, of_labels = reading.inspect(images, labels)
    network = known(build_network(config.model, infos[0].bands, classes=2), config.model.freeze_norm)
    footprint = network_footprint(network.graph(), config.tiling.halo_width(), config.parallel.exact)
    grid = config.tiling.grid_shape()
    assert grid is not None, "resolve has checked it"
    plan = StorePlan(infos, of_labels or None, tuple(make_tiling(info.shape, grid, footprint) for info in infos))
    files = [file for _, info, _ in plan.rasters() for file in info.files]
    check_outputs([whole("--output", output, plan.bytes)], [*files, *inputs])
    if os.path.exists(output):
        raise OutputError(f"--output {output} is there; remove it, or choose another output")
    if config.run.verbosity:
        warn(left_out(typed, "--images"))
        warn([*reference_notes((*infos, *of_labels)), *code_notes(infos)])
        warn(note for info in infos for note in info.notes)
    lost = [info.path for info in infos if info.ground is not None and kind == ZARR]
    warn(f"a Zarr store does not keep the ground control of {path}" for path in lost)
    return plan, reading, (images, labels)


def _write_hdf5(output: str, plan: StorePlan, image: Opener, label: Opener, verbosity: int) -> None:
    from tiledseg.execution.progress import StepProgress
    from tiledseg.raster.tile_store import write_store

    done = count(1)
    with closing(StepProgress(sum(map(len, plan.tilings)), 0, verbosity)) as progress:

        def advance(number: int) -> None:
            tick()
            progress.advance(next(done), f"image {number}")

        write_store(output, plan, image, label, advance)


def _write_zarr(output: str, plan: StorePlan, image: Opener, label: Opener, mesh: Mesh) -> None:
    from tiledseg.raster.statistics import NO_VALID_PIXEL
    from tiledseg.raster.zarr_writer import begin_tiles, write_tiles

    with writing(output), ExitStack() as held:  # by the root
        store = mesh.on_root(lambda: held.enter_context(unfinished(output)))
        mesh.on_root(lambda: begin_tiles(store.file(), plan))
        own_valid = mesh.on_all(lambda: write_tiles(store.file(), plan, image, label, mesh.rank, mesh.size, tick))
        valid = mesh.communicator.gather_objects(own_valid)

        def end() -> None:
            if not any(valid):
                raise RasterError(NO_VALID_PIXEL)
            store.publish(replaces=False)

        mesh.on_root(end)
