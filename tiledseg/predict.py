"""`tiledseg predict --checkpoint RUN --image a.tif --output classes.tif`: maps rasters, under any launcher."""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.predict")

import json
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledseg.comm.session import joined_mesh, run_on_mesh
from tiledseg.commands.options import add_keys, config_of, parse
from tiledseg.commands.parser import Parser, command, flag_of, refuse_given
from tiledseg.config.checks import AUTO, checked
from tiledseg.config.parallel import NONE
from tiledseg.config.run import CROPS, Config
from tiledseg.config.words import COMPRESSIONS, FORMATS, NO_VIEWS, VIEWS
from tiledseg.errors import ConfigError, renamed
from tiledseg.raster.array_names import array_of, takes_arrays
from tiledseg.system.freed_memory import keep_freed_memory

if TYPE_CHECKING:
    from torch import nn
    from xarray import DataArray

    from tiledseg.comm.mesh import Mesh
    from tiledseg.inference.trained import Trained
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
        from tiledseg.commands.map_images import map_images  # here: torch is imported after MPI has started

        map_images(options, config, mesh)

    return run_on_mesh(work, config.parallel.transport, config.parallel.deadline)


def parse_groups(options: Namespace) -> Config:
    """Return the configuration from the options that are its keys. Raise ConfigError."""
    if options.polygons is None:
        refuse_given(options, ("polygons_classes",), "--polygons is not given", "give it")
    config = config_of(options, memory={"blocks": NONE}, data={"mosaic": None})
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
    from tiledseg.commands.map_images import map_by

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
        return map_by(network, options, config, of_module, array, mesh)
