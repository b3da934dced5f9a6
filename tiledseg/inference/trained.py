"""A trained network with the facts of its inputs and outputs, and networks that map rasters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tiledseg.architecture.network import ForeignNetwork, Network
from tiledseg.checkpoint.folder import Checkpoint, checkpoint_files, find_checkpoint
from tiledseg.checkpoint.loading import check_finite, check_kind, load_network, read_state_dict, strip_prefixes
from tiledseg.comm.mesh import ALONE, Mesh
from tiledseg.config.checks import checked, one_of
from tiledseg.errors import CheckpointError, ConfigError
from tiledseg.execution.carrying import PARAMETER_DTYPES
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.declared import CropGrid
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.models.dropout import set_dropout_key
from tiledseg.models.network import GraphNetwork
from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.lists import SourceRules
from tiledseg.raster.statistics import Normalization, Normalizer
from tiledseg.tracing.build import network_modules, traced_module


class Trained:
    """A trained network and its checkpoint. `network`: in evaluation mode, on the CPU, in the dtype of its training; it
    maps normalised pixels (B, bands, height, width) to logits (B, classes, height, width).

    `band_numbers`: the numbers, from 1, of the file's bands that the network takes, in its order. `ignore_index`: the
    class number of pixels that do not count. `normalization`: mean and deviation of each band over the training images.
    """

    def __init__(self, network: GraphNetwork, checkpoint: Checkpoint) -> None:
        self.network, self.checkpoint = network, checkpoint
        saved, data = checkpoint.saved, checkpoint.saved.config.data
        self.bands, self.classes = saved.network.bands, saved.network.classes
        self.ignore_index, self.normalization = data.ignore_index, saved.normalization
        times = max(1, len(data.times))
        own = [number for number in range(1, self.bands // times + 2) if number != data.valid]
        self.band_numbers = (data.bands or own[: self.bands // times]) * times

    def normalize(self, pixels_CHW: NDArray, valid_HW: NDArray[np.bool_] | None = None) -> torch.Tensor:
        """Return a raster's pixels normalised as a batch of one, x_BCHW; 0 at invalid pixels."""
        dtype = torch.zeros((), dtype=next(self.network.parameters()).dtype).numpy().dtype
        valid_HW = np.ones(pixels_CHW.shape[1:], bool) if valid_HW is None else valid_HW
        return torch.from_numpy(Normalizer(self.normalization, pixels_CHW.dtype, dtype)(pixels_CHW, valid_HW))[None]


@checked
def load(run: str | Path, build: str | None = None, which: str = "latest") -> Trained:
    """Load the trained network of a run's folder (its `latest` or `best` checkpoint), or of one checkpoint; with the
    averaged weights, if the run has them.

    `build`: the function of `model.build`. Raises ConfigError if it is another one, CheckpointError if there is no
    checkpoint, or a file is damaged.
    """
    checkpoint = find_named(run, build, which)
    return Trained(load_trained(checkpoint, checkpoint.saved.network), checkpoint)


def find_named(run: str | Path, build: str | None = None, which: str | None = None) -> Checkpoint:
    """Return the checkpoint of a run (`find_checkpoint`), or the named one. Raises ConfigError unless `build` is the
    function that builds its network, if any: code named in a file runs only if the user names it too."""
    if which is not None:
        one_of("which", which, ("latest", "best"))
    checkpoint = find_checkpoint(run, which)
    network = checkpoint.saved.network
    own = network.build if isinstance(network, ForeignNetwork) else None
    if own is not None and build is None:
        raise ConfigError(
            f"the network was built by {own}, which runs only if you name it too: --build {own}, or in Python "
            f"load(run, build='{own}')"
        )
    if build is not None and build != own:
        there = f"was built by {own}" if own else "is one of this program's"
        raise ConfigError(f"--build is {build}, but the network {there}; give the same, or leave it out")
    return checkpoint


def load_trained(
    checkpoint: Checkpoint,
    network: Network,
    weights: Mapping[str, torch.Tensor] | None = None,
    mesh: Mesh = ALONE,
) -> GraphNetwork:
    """Return the checkpoint's network in evaluation mode, on the CPU, in the dtype of its training.

    `weights`: weights and buffers by name, in place of the checkpoint's. The root of `mesh` reads the checkpoint for
    all ranks. Collective.
    """
    config = checkpoint.saved.config
    trains = getattr(network, "crops", None) is None  # crops serve maps alone, which need less of a module
    modules = network_modules(network, trains=trains, still=config.model.freeze_norm)
    modules = modules.to(PARAMETER_DTYPES[config.train.precision])
    if weights is None:
        load_network(checkpoint, modules, average=True, mesh=mesh)
    else:
        modules.load_state_dict(weights)
    set_dropout_key(modules)  # without keys, dropout in later training uses torch's generator
    return modules.eval()


IGNORED = 255
MOST_CLASSES = 255
_SHOWN = 10  # names of a long list in a message


@dataclass(frozen=True)
class Mapper:
    """A network that maps rasters, the same on every rank.

    `describe`: return its value, with a graph; called on one rank. `build`: return its modules in evaluation mode, on
    the CPU, on each rank of a mesh (collective). `bands`: numbers of the raster's bands
    (None: all); `normalization`: of these (None: identity). `files`: files that no output may replace. `legend`: names
    and colours of the classes, if known. `composing`: how the training's images were made.
    """

    describe: Callable[[], Network]
    build: Callable[[Mesh], GraphNetwork]
    bands: list[int] | None = None
    nodata: float | None = None
    ignore_index: int = IGNORED
    normalization: Normalization | None = None
    files: tuple[str, ...] = ()
    legend: tuple[ClassRecord, ...] | None = None
    composing: SourceRules | None = None


def checkpoint_mapper(
    checkpoint: Checkpoint, weights: Mapping[str, torch.Tensor] | None = None, crops: CropGrid | None = None
) -> Mapper:
    """Return the mapper of a checkpoint's network (`find_named`), with `weights` in place of its own. `crops`: of a
    module that is not traced (None: as trained). Raises ConfigError for crops of one of this program's networks."""
    saved = checkpoint.saved
    data, network = saved.config.data, saved.network
    if crops is not None:
        if not isinstance(network, ForeignNetwork):
            raise ConfigError(
                f"window is {crops.window}, but this program's own networks map exactly without; leave window out"
            )
        network = replace(network, crops=crops)

    def build(mesh: Mesh) -> GraphNetwork:
        return load_trained(checkpoint, network, weights, mesh)

    return Mapper(
        lambda: network.traced(build(ALONE).graph) if isinstance(network, ForeignNetwork) else network,
        build,
        data.bands,
        data.nodata,
        data.ignore_index,
        saved.normalization,
        tuple(map(str, checkpoint_files(checkpoint))),
        saved.label_map.classes,
        SourceRules(*data.composing),
    )


@dataclass(frozen=True)
class TracedNetwork:
    """The value of a traced module."""

    nodes: Graph
    bands: int
    classes: int
    in_words: str

    def graph(self) -> Graph:
        return self.nodes


def module_mapper(
    module: nn.Module,
    bands: int,
    numbers: list[int] | None = None,
    classes: int | None = None,
    normalization: Normalization | None = None,
    crops: CropGrid | None = None,
    whole: bool = False,
) -> Mapper:
    """Return the mapper of a module for images of `bands` bands (`numbers` of the raster; None: all). A copy in
    evaluation mode maps. `crops`: the module runs on crops, untraced. `whole`: one rank maps whole images, so a module
    of so many `classes` that cannot be traced runs as it is.

    Raises ConfigError that lists every operation of the module that tiles would change, or if its first output is not
    scores of 2 to 255 classes, or of another number than `classes`.
    """
    if crops is not None:
        from tiledseg.tracing.crops import crops_network

        network = crops_network(copy.deepcopy(module).eval(), bands, crops, classes)
    elif isinstance(module, GraphNetwork):
        network = module
    else:
        network = traced_module(copy.deepcopy(module).eval(), bands, whole=classes if whole else None)
    channels = tensor_channels(network.graph, bands)[network.graph.results[0]]
    name = type(module).__name__
    if classes is not None and classes != channels:
        raise ConfigError(f"{name} gives {channels} channels for {classes} classes; give the number that it has")
    if not 2 <= channels <= MOST_CLASSES:
        raise ConfigError(
            f"{name} gives {channels} channels, but a class map has 2 to {MOST_CLASSES} classes; give each a channel"
        )
    value = TracedNetwork(network.graph, bands, channels, name)
    own = (lambda: network) if crops else (lambda: copy.deepcopy(network))
    return Mapper(lambda: value, lambda _: own().eval(), numbers, normalization=normalization)


def fill(module: nn.Module, path: str) -> None:
    """Copy the weights of a file (torch's, read as weights only, or safetensors) into a module, under its names, maybe
    with prefixes of wrappers. Raises CheckpointError that lists missing and unexpected names."""
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
