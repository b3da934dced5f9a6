"""The work of `tiledseg predict` and of `predict_raster`: the network that maps, and a request for each image.

It imports torch: a session starts MPI before it.
"""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from tiledseg.architecture.network import ForeignNetwork
from tiledseg.architecture.presets import crop_grid
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.config.checks import Range
from tiledseg.config.parallel import NONE
from tiledseg.config.run import Config, TilingConfig
from tiledseg.config.words import Packing
from tiledseg.errors import ConfigError, explained
from tiledseg.execution.memory import memory_per_rank
from tiledseg.geometry.box import Box
from tiledseg.inference.predictor import predict_all
from tiledseg.inference.request import Request, each_image
from tiledseg.inference.trained import Mapper, Trained, checkpoint_mapper, fill, find_named, module_mapper
from tiledseg.planning.run.blocks import BlockSettings, seen_whole
from tiledseg.planning.run.spread import measuring
from tiledseg.raster.array_place import dims_of, flags
from tiledseg.raster.finding import expand_sources
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.lists import EVERY, SourceRules
from tiledseg.raster.reader import open_raster
from tiledseg.raster.statistics import given_normalization
from tiledseg.system.console import say
from tiledseg.tracing.build import built_module


def map_images(options: Namespace, config: Config, mesh: Mesh) -> None:
    """Write the maps of a command's options. Collective."""
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


def map_by(
    network: Any, options: Namespace, config: Config, of_module: Mapping[str, Any], array: Any, mesh: Mesh
) -> Any:
    """Write the maps of a module, a result of `load` or a run's path; return the map of an `array` as one, else None.
    `of_module`: the arguments that serve a module alone. Collective."""
    mapper = _mapper(network, options.image, config, of_module, mesh)
    requests = _requests(options, config, mapper, mesh)
    if vars(options)["parallel.halo"] is None and config.parallel.exact:
        requests = mesh.on_root(lambda: _exactly(requests, mapper, mesh.size))
    if array is None:
        predict_all(requests, mapper, memory_per_rank(mesh), mesh)
        return None
    folder = mesh.on_root(lambda: tempfile.mkdtemp(prefix="tiledseg-"))
    try:
        path = f"{folder}/{options.output}"
        predict_all([replace(requests[0], output=path)], mapper, memory_per_rank(mesh), mesh, ends=False)
        result = mesh.on_all(lambda: _as_array(array, path))
        mesh.communicator.barrier()
        return result
    finally:
        if mesh.is_root:
            shutil.rmtree(folder, ignore_errors=True)


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
    memory = config.memory
    request = Request(
        image="",
        output="",
        config=config,
        packing=Packing(options.format, options.compress),
        polygons_classes=options.polygons_classes and tuple(options.polygons_classes.split(",")),
        views=options.tta,
        normalize=options.normalize,
        blocks=None if memory.blocks == NONE else BlockSettings(memory.blocks_shape(), memory.in_file),
        inputs=tuple(options.config),
    )
    targets = {name: getattr(options, name) for name in ("output", "probabilities", "polygons")}
    return mesh.on_root(lambda: each_image(request, options.image, targets, mapper.composing))


def _as_array(source: Any, path: str) -> Any:
    """Return the class map at `path` as an array with the place of `source`, a DataArray."""
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
    graph, first = mapper.describe().graph(), requests[0]
    config, whole, grid = first.config, seen_whole(graph), first.config.tiling.grid_shape()
    mode = "layer" if grid != (1, 1) and measuring(graph, trains=False) else "read"
    if mode != "read" and ranks == 1 and whole is not None and grid is not None and config.run.verbosity:
        say(f"warning: grid is not used: '{whole}' needs the whole image at once; start several ranks")
    if mode == "read" or ranks > 1 or whole is not None or (first.blocks is not None and first.blocks.shape):
        config = replace(config, parallel=replace(config.parallel, halo=mode))
        return [replace(one, config=config) for one in requests]
    blocks = BlockSettings(grid, config.memory.in_file, if_needed=grid is None and first.blocks is None)
    return [replace(one, config=replace(config, tiling=TilingConfig()), blocks=blocks) for one in requests]


def _mapper(network: Any, images: Sequence[str], config: Config, of_module: Mapping[str, Any], mesh: Mesh) -> Mapper:
    """Return the mapper of a network; `of_module`: the arguments that serve a module alone. Collective."""
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
