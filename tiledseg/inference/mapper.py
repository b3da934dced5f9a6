"""Networks that map rasters, with the meaning of their inputs and outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tiledseg.architecture.foreign import ForeignNetwork
from tiledseg.architecture.network import Network
from tiledseg.checkpoint.folder import Checkpoint, checkpoint_files
from tiledseg.checkpoint.weights_file import check_finite, check_kind, read_state_dict, strip_prefixes
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import CheckpointError, ConfigError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.inference.trained import load_trained
from tiledseg.models.network import GraphNetwork
from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.statistics import Normalization
from tiledseg.tracing.build import network_modules
from tiledseg.tracing.trace import trace

IGNORED = 255
MOST_CLASSES = 255
_SHOWN = 10  # names of a list that may be long


@dataclass(frozen=True)
class Mapper:
    """A network that maps, as `predictor` takes it, on every rank the same.

    `describe`: its value, with a graph, asked for on one rank; `build`: its modules, ready, on the CPU, on each rank of
    a mesh (collective), or on one alone (None).
    `bands`: the raster's that it takes (None: all); `normalization`: of these (None: they stay as they are). `files`:
    what no output may take the place of. `legend`: its classes' names and colours, where they are known.
    """

    describe: Callable[[], Network]
    build: Callable[[Mesh | None], GraphNetwork]
    bands: list[int] | None = None
    nodata: float | None = None
    ignore_index: int = IGNORED
    normalization: Normalization | None = None
    files: tuple[str, ...] = ()
    legend: tuple[ClassRecord, ...] | None = None


def checkpoint_mapper(checkpoint: Checkpoint, weights: Mapping[str, torch.Tensor] | None = None) -> Mapper:
    """Return the network of a checkpoint, which the user has named (`trained.check_named`); `weights` in place of its
    own."""
    saved = checkpoint.saved
    data, network = saved.config.data, saved.network

    def build(mesh: Mesh | None) -> GraphNetwork:
        return load_trained(checkpoint, network, weights, mesh)

    return Mapper(
        lambda: network.traced(build(None).graph) if isinstance(network, ForeignNetwork) else network,
        build,
        data.bands,
        data.nodata,
        data.ignore_index,
        saved.normalization,
        tuple(map(str, checkpoint_files(checkpoint))),
        saved.label_map.classes,
    )


@dataclass(frozen=True)
class TracedNetwork:
    """The value of a module that is at hand."""

    nodes: Graph
    bands: int
    classes: int
    in_words: str

    def graph(self) -> Graph:
        return self.nodes


def module_mapper(
    module: nn.Module,
    bands: int,
    numbers: Sequence[int] | None = None,
    classes: int | None = None,
    normalization: Normalization | None = None,
) -> Mapper:
    """Return a module for images of `bands` bands (`numbers` of the raster, None: all), with the weights that it has
    now: a copy of it maps, in evaluation mode.

    Raises ConfigError that lists every place of it that tiles would change, or where its first output is no scores of
    2 to 255 classes, of `classes` where that is given.
    """
    network = module if isinstance(module, GraphNetwork) else trace(copy.deepcopy(module).eval(), bands)
    channels = tensor_channels(network.graph, bands)[network.graph.results[0]]
    name = type(module).__name__
    if classes is not None and classes != channels:
        raise ConfigError(f"{name} gives {channels} channels for {classes} classes; give the number that it has")
    if not 2 <= channels <= MOST_CLASSES:
        raise ConfigError(
            f"{name} gives {channels} channels, but a class map has 2 to {MOST_CLASSES} classes; give each a channel"
        )
    value = TracedNetwork(network.graph, bands, channels, name)
    chosen = None if numbers is None else list(numbers)
    return Mapper(lambda: value, lambda _: copy.deepcopy(network).eval(), chosen, normalization=normalization)


def weights_mapper(
    network: ForeignNetwork, path: str, numbers: Sequence[int] | None, normalization: Normalization | None
) -> Mapper:
    """Return a network that the user's function builds, with the weights of a file (torch's, read as weights only, or
    safetensors), under the module's names, or with what wrappers put before these (`module.`, see `strip_prefixes`).
    Raises CheckpointError that lists the names that the file lacks, and those that it has besides."""

    held: list[GraphNetwork] = []  # whose graph was asked for: not built a second time

    def build(_: Mesh | None) -> GraphNetwork:  # the file is every rank's
        if held:
            return held.pop()
        modules = network_modules(network, trains=False)
        fill(modules, path)
        return modules.eval()

    def known() -> ForeignNetwork:
        held[:] = [build(None)]
        return network.traced(held[0].graph)

    chosen = None if numbers is None else list(numbers)
    return Mapper(known, build, chosen, normalization=normalization, files=(path,))


def fill(module: nn.Module, path: str) -> None:
    """Copy the weights of a file into a module. Raises CheckpointError for a file of another network."""
    own = module.state_dict()
    state = strip_prefixes(read_state_dict(path), own)
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    for name in (name for name in own if name in state):
        check_kind(path, name, state[name], own[name])
    shapes = [name for name in own.keys() & state.keys() if own[name].shape != state[name].shape]
    faults = [
        f"{what} {', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
        for what, names in (("it lacks", missing), ("it has besides", unexpected), ("other shapes have", shapes))
        if names
    ]
    if faults:
        raise CheckpointError(f"{path} is of another network: {'; '.join(faults)}; give the file of this one")
    module.load_state_dict(state)
    for name, weight in module.named_parameters():
        check_finite(path, name, weight)
