"""The protocol of networks (a graph, numbers of bands and classes), checks of their options, and the network that a
user's function builds, whose graph exists once it is traced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

from tiledseg.config.checks import Range, check_value, one_of
from tiledseg.config.run import ModelConfig
from tiledseg.config.words import ENCODERS, NORMS, PADDINGS, UPSAMPLINGS
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.declared import CropGrid
from tiledseg.geometry.layers.pixelwise import Activation, norm_or_mark


class Network(Protocol):
    """A network as a value: equal values are the same network."""

    @property
    def bands(self) -> int:
        """Channels of its input."""

    @property
    def classes(self) -> int:
        """Channels of its first output."""

    @property
    def in_words(self) -> str:
        """The name and options, for the user, in a line or two."""

    def graph(self) -> Graph:
        """Return its nodes."""


@runtime_checkable
class Pretrainable(Network, Protocol):
    """A network with a published encoder, for which files of weights exist."""

    def file_names(self, normed: bool) -> dict[str, str]:
        """Return the name in the file of each of the encoder's nodes. `normed`: the file's network has batch norms."""


WORDS = {"padding": PADDINGS, "upsampling": UPSAMPLINGS, "norm": NORMS, "encoder": ENCODERS}
BANDS, CLASSES = Range(1, 65535), Range(2, 255)


def check_options(network: Any) -> None:
    """Raise ConfigError for the first option of a network that is out of range."""
    for described in fields(ModelConfig):
        if hasattr(network, described.name):
            check_value(f"model.{described.name}", getattr(network, described.name), described)
    BANDS.check("model.bands", network.bands)
    CLASSES.check("data.classes", network.classes)
    for key, words in WORDS.items():
        if hasattr(network, key):
            one_of(f"model.{key}", getattr(network, key), words)


def groups_of(channels: int) -> int:
    """Return the number of groups of a group norm."""
    return min(8, channels)


def unit(name: str, number: int | str, layer: Convolution, norm: str, source: str = "") -> list[Node]:
    """Return a convolution, its norm and its activation."""
    return [
        Node(f"{name}.conv{number}", layer, (source,) if source else ()),
        Node(f"{name}.norm{number}", norm_or_mark(norm, groups_of(layer.out_channels))),
        Node(f"{name}.act{number}", Activation(0.0)),
    ]


def check_groups(norm: str, widths: list[tuple[str, int]], base_channels: int) -> None:
    """Raise ConfigError for the first of `widths` (name, channels) that a group norm's groups do not divide."""
    for place, channels in widths if norm == "group" else ():
        if channels % groups_of(channels):
            raise ConfigError(
                f"model.norm is group, but {place} has {channels} channels, which do not divide into "
                f"{groups_of(channels)} groups, with model.base_channels {base_channels}; give 1, 2, 4 or a multiple "
                "of 8"
            )


_BUILD = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class UntracedError(ConfigError):
    """A network without a graph: its function has not been run."""


def _odd_key(value: Any) -> Any:
    """Return a key, at any depth of maps, that is no text; None if all are."""
    if isinstance(value, Mapping):
        own = next((key for key in value if not isinstance(key, str)), None)
        return own if own is not None else _odd_key(list(value.values()))
    if isinstance(value, list | tuple):
        return next((key for part in value if (key := _odd_key(part)) is not None), None)
    return None


@dataclass(frozen=True)
class ForeignNetwork:
    """A network built by the function `build` ("package.module:function") for `bands` and `classes`.

    `arguments`: JSON with sorted keys, so that equal networks have equal text. `crops`: the grid on which an untraced
    module runs; None for a traced module. `times`: the number of times of its images, in a dim of their own; `bands`
    counts those of all times.

    Nothing is imported here; `tracing.build` imports the function once a user has named it.
    """

    build: str
    arguments: str = "{}"
    bands: int = 3
    classes: int = 2
    crops: CropGrid | None = None
    times: int | None = None

    def __post_init__(self) -> None:
        if self.times and self.bands % self.times:
            what = f"model.series is {self.times}, but an image has {self.bands} bands, no multiple of it"
            raise ConfigError(f"{what}; give data.times, or images with the bands of all times")
        if not _BUILD.fullmatch(self.build):
            raise ConfigError(f"model.build is '{self.build[:60]}'; give package.module:function")
        try:
            is_map = isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            is_map = False
        if not is_map:
            raise ConfigError(f"the arguments of {self.build} are no map; give names and values")

    @staticmethod
    def of(
        build: str,
        arguments: Mapping[str, Any],
        bands: int,
        classes: int,
        crops: CropGrid | None = None,
        times: int | None = None,
    ) -> ForeignNetwork:
        """Return a network. Raises ConfigError for arguments that are no numbers, text, booleans, lists or maps."""
        try:
            text = json.dumps(dict(arguments), sort_keys=True, allow_nan=False)
            odd = _odd_key(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"model.arguments cannot be written down ({error}); give numbers, text, lists") from None
        if odd is not None:
            raise ConfigError(f"model.arguments has the key {odd}, which is no text; quote it, or give a list")
        return ForeignNetwork(build, text, bands, classes, crops, times)

    @property
    def keywords(self) -> dict[str, Any]:
        """The function's arguments besides bands and classes."""
        return json.loads(self.arguments)

    @property
    def in_words(self) -> str:
        arguments = ", ".join(f"{key}={value}" for key, value in self.keywords.items())
        times = f", of {self.times} times" if self.times else ""
        return f"{self.build}({arguments}){f', {self.crops.in_words}' if self.crops else ''}{times}"

    def traced(self, graph: Graph) -> ForeignNetwork:
        """Return the same network with its graph."""
        network = replace(self)
        object.__setattr__(network, "_graph", graph)  # no field: the graph takes no part in equality
        return network

    def graph(self) -> Graph:
        """Return the graph. Raises UntracedError before the network is traced."""
        graph: Graph | None = self.__dict__.get("_graph")
        if graph is None:
            raise UntracedError(
                f"the network is code, {self.build}, which runs only where it is named; give --build {self.build} "
                "(docs/how-to/own-network.md)"
            )
        return graph
