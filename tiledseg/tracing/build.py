"""Networks built by a user's function, given by its name: the one place that imports code by a name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import nn

from tiledseg.architecture.network import ForeignNetwork, Network
from tiledseg.errors import ConfigError, first_line
from tiledseg.geometry.layers.declared import Crops
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.models.layers.times import TimeSeries
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.tracing.state import drawn_from

WAYS_OUT = "in crops of one size (window), or mapped whole on one rank (grid 1, and classes)"


def known(network: Network, still: bool = False) -> Network:
    """Return the network with its graph; a user's function is called and its module traced. Raises ConfigError for a
    function that cannot be called, and for a module that cannot be computed exactly on tiles."""
    if not isinstance(network, ForeignNetwork):
        return network
    return network.traced(network_modules(network, still=still).graph)


def network_modules(
    network: Network, seed: int | None = None, trains: bool = True, still: bool = False
) -> GraphNetwork:
    """Return the modules of any network, with weights drawn from `seed` alone, equal on all ranks; errors as `known`.

    `trains` False: for maps alone, traced in evaluation mode. `still`: running statistics will be constants.
    """
    if not isinstance(network, ForeignNetwork):
        return build_modules(network, seed)
    build, module = network.build, built_module(network, seed or 0).train(trains)
    if network.crops is not None:
        from tiledseg.tracing.crops import crops_network

        return crops_network(module, network.bands, network.crops, network.classes, trains)
    modules = traced_module(module, network.bands, still)
    graph = modules.graph
    if len(graph.results) > 1:
        raise ConfigError(f"{build} gives {len(graph.results)} outputs; return the scores of the classes alone")
    channels, classes = tensor_channels(graph, network.bands)[graph.results[0]], network.classes
    if channels != classes:
        raise ConfigError(f"{build} gives {channels} channels for {classes} classes; give each class one, and no more")
    return modules


def traced_module(module: nn.Module, bands: int, still: bool = False, whole: int | None = None) -> GraphNetwork:
    """Return the network of a traced module. One that cannot be traced runs untraced, with `whole` classes; without
    `whole`, raise ConfigError that names the ways to run it."""
    from tiledseg.tracing.trace import trace  # here: our own networks do not need it

    try:
        return trace(module, bands, still=still)
    except ConfigError as error:
        if whole is None:
            raise ConfigError(f"{error}; or run it as it is: {WAYS_OUT}") from error
    from tiledseg.tracing.crops import untraced

    return untraced(module, bands, Crops(None, whole))


def built_module(network: ForeignNetwork, seed: int) -> nn.Module:
    """Return the module of a user's function, with weights drawn from `seed`. Raises ConfigError."""
    function, build = _function(network.build), network.build
    times = network.times or 1
    arguments = {"bands": network.bands // times, "classes": network.classes, **network.keywords}
    with drawn_from(seed):
        try:
            module = function(**arguments)
        except Exception as error:  # whatever its author raises
            what = f"{network.in_words} has failed with {', '.join(arguments)}"
            raise ConfigError(f"{what}: {type(error).__name__}: {first_line(error)}; change model.arguments") from error
    if not isinstance(module, nn.Module):
        kind = module.__name__ if isinstance(module, type) else f"a {type(module).__name__}"
        raise ConfigError(f"{build} gives {kind}, no torch.nn.Module; return a module, built")
    return module if network.times is None else TimeSeries(module, times)


def _function(build: str) -> Callable[..., Any]:
    name, _, path = build.partition(":")
    try:
        value: Any = attrgetter(path)(importlib.import_module(name))
    except Exception as error:  # whatever a file raises when it is imported
        what = f"{build} cannot be imported: {type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{what}; mend it, install its package, or put its folder on PYTHONPATH") from error
    if not callable(value):
        raise ConfigError(f"{build} is a {type(value).__name__}, no function; give one that returns a module")
    return value
