"""The Python interface (`docs/reference/python.md`): the commands as functions that raise their errors."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledseg.architecture.presets import crop_grid
from tiledseg.config.checks import checked
from tiledseg.config.run import Config
from tiledseg.errors import ConfigError, TiledsegError, renamed
from tiledseg.foreign.spread import Halo, traced
from tiledseg.raster.array_names import takes_arrays

if TYPE_CHECKING:
    from torch import nn
    from xarray import DataArray

    from tiledseg.comm.mesh import Mesh
    from tiledseg.execution.scores import Scores
    from tiledseg.inference.request import Request
    from tiledseg.inference.trained import Mapper, Trained
    from tiledseg.models.network import GraphNetwork
    from tiledseg.raster.statistics import Normalization


@checked
def halo(network: nn.Module | Trained, bands: int | None = None) -> Halo:
    """Return the halo of a module, or of a result of `load`. `bands`: of its images (None: those of its first
    convolution).

    Raises ConfigError with a list of all operations that are not exact on tiles, GeometryError if no exact tile exists.
    """
    module: Any = network
    return Halo.of(traced(getattr(module, "network", module), bands).graph)


@checked
def trace(module: nn.Module, bands: int | None = None) -> GraphNetwork:
    """Return any convolutional module as a graph, with the same weights under the same names.

    `bands`: of its input (None: those of its first convolution). Raises ConfigError that lists every operation that is
    not exact on tiles, with reason and remedy.
    """
    return traced(module, bands)


@takes_arrays
def train_network(config: Config | Mapping[str, Any] | str | Path) -> Path:
    """Train like `tiledseg train`, on any number of ranks; return the run's folder. Collective.

    `config`: groups of keys, or a YAML file of them. Images and labels may be xarray.DataArrays with x and y. torch's
    deterministic mode stays as `train.deterministic` sets it. Raises InputError before anything is written,
    TiledsegError if a signal stops the run early, with its checkpoint written.
    """
    from tiledseg.comm.session import joined_mesh
    from tiledseg.commands.options import as_config, parse_config, to_yaml
    from tiledseg.raster.labels.classes import class_files, read_classes
    from tiledseg.training.start import start

    files = [str(config)] if isinstance(config, (str, Path)) else []
    if files:
        config = parse_config(["--config", *files], "tiledseg train", "")
    elif isinstance(config, Mapping):
        config = as_config(config)
    if not isinstance(config, Config):
        raise ConfigError(f"the configuration is {config!r}; give a map of groups of keys, or the path of a YAML file")
    files += class_files(config.data.classes)
    config = replace(config, data=replace(config.data, classes=read_classes(config.data.classes)))
    config.check()
    with joined_mesh() as mesh:
        code = start(config, to_yaml(config), mesh, files)
    if code:
        raise TiledsegError(
            f"{config.run.output}: stopped by a signal with its checkpoint written; call again to go on"
        )
    return Path(config.run.output)


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
    from tiledseg.comm.session import joined_mesh
    from tiledseg.commands.options import parse
    from tiledseg.commands.parser import refuse_given
    from tiledseg.execution.memory import memory_per_rank
    from tiledseg.inference.predictor import predict_all
    from tiledseg.inference.request import each_image
    from tiledseg.predict import build_parser, parse_groups, request_of
    from tiledseg.raster.array_names import array_of

    images = [str(one) for one in ([source] if isinstance(source, (str, Path)) else source)]
    array = array_of(images[0]) if target is None and len(images) == 1 else None
    if array is not None:
        target, flags = "map.tif", flags | {"format": "gtiff", "compress": "none"}  # in a temporary folder
    elif target is None:
        raise ConfigError("target is None, but source is no xarray.DataArray; give the path of the map")
    refused = [name for name in _OF_COMMAND if flags.get(name) is not None]
    if refused:
        raise ConfigError(f"{refused[0]} is given, but network is the network; leave it out (tiledseg.predict_raster)")
    paths = {"output": target, "probabilities": probabilities, "polygons": flags.get("polygons")}
    files = {name: None if path is None else str(path) for name, path in paths.items()}
    if not isinstance(named := flags.get("polygons_classes", ""), str):
        flags["polygons_classes"] = None if named is None else ",".join(map(str, named))
    more = {
        "tiling": {"grid": list(grid) if isinstance(grid, tuple) else grid},
        "memory": {"blocks": "auto", **memory} if memory and "store" in memory else memory,
        "parallel": parallel,
    }
    options = parse(build_parser(), (), {**flags, "image": images, **files, **more})
    refuse_given(options, ("parallel.transport", "parallel.deadline"), "the program's own process group has these")
    config = parse_groups(options)
    request = request_of(options, config)
    of_module = {"bands": bands, "normalize": normalize, "classes": classes}
    with joined_mesh() as mesh:
        mapper = _mapper(network, images, config, of_module, mesh)
        requests = mesh.on_root(lambda: each_image(request, images, files, mapper.composing))
        if "halo" not in (parallel or {}) and request.parallel.exact:
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
    from tiledseg.geometry.box import Box
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
    from tiledseg.config.parallel import HOST
    from tiledseg.planning.run.blocks import BlockSettings, seen_whole
    from tiledseg.planning.run.spread import exact_modes
    from tiledseg.system.console import say

    graph, first = mapper.describe().graph(), requests[0]
    whole, grid, parallel = seen_whole(graph), first.grid, first.parallel
    mode = exact_modes(graph, 1 if grid == (1, 1) else 2, trains=False)[0]
    if mode != "read" and ranks == 1 and whole is not None and grid is not None and first.verbosity:
        say(f"warning: grid is not used: '{whole}' needs the whole image at once; start several ranks")
    if mode == "read" or ranks > 1 or whole is not None or (first.blocks is not None and first.blocks.shape):
        return [replace(one, parallel=replace(parallel, halo=mode)) for one in requests]
    blocks = BlockSettings(grid, first.store != HOST, if_needed=grid is None and first.blocks is None)
    return [replace(one, grid=None, blocks=blocks) for one in requests]


def _mapper(network: Any, images: Sequence[str], config: Config, of_module: Mapping[str, Any], mesh: Mesh) -> Mapper:
    """Return the mapper of a network; `of_module`: the arguments that serve a module alone. Collective."""
    from torch import nn

    from tiledseg.comm.failure import mark_agreed
    from tiledseg.inference.trained import Trained, checkpoint_mapper, find_named
    from tiledseg.predict import mapper_of

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


@checked
def evaluate_map(prediction: str | Path, labels: str | Path, **flags: Any) -> Scores:
    """Return the scores of a class map against its labels, like `tiledseg evaluate`.

    `flags`: any other flag of the command, with `_` for `-`. `classes`: any form of `data.classes`, or a file of them;
    None: count class numbers in the data. Labels may be polygons, with `classes`; `label_layer`, `label_attribute`,
    `background` and `warp` are those of `data`. Raises RasterError if the grids differ, LabelError for a value outside
    the classes, and for a class whose name has another number in the other file or in `classes`. Different names of a
    class are a warning.
    """
    from tiledseg.commands.options import parse
    from tiledseg.evaluate import build_parser, evaluated

    def warn(lines: Iterable[str]) -> None:
        for line in lines:
            warnings.warn(line, stacklevel=5)

    given = {**flags, "prediction": str(prediction), "labels": str(labels)}
    return evaluated(parse(build_parser(), (), given), warn)[1]
