"""The protocol of networks: a graph, and the numbers of bands and classes. And the values of their options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Protocol, runtime_checkable

from tiledseg.config.checks import Range, check_value, one_of
from tiledseg.config.run import ModelConfig
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.pixelwise import Activation, Norm


class Network(Protocol):
    """A network as a value: equal ones are the same network."""

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
    """A network whose encoder is a published one, for which files of weights exist."""

    def file_names(self, normed: bool) -> dict[str, str]:
        """Return the name in the file of each of the encoder's nodes, from the input on. `normed`: True if the file's
        network has batch norms."""


PADDINGS = ("same", "valid")
UPSAMPLINGS = ("transposed", "nearest", "bilinear")
NORMS = ("none", "pixel", "instance", "group", "batch")
ENCODERS = ("resnet18", "resnet34", "resnet50", "wide38")  # of which a network may have some
WORDS = {"padding": PADDINGS, "upsampling": UPSAMPLINGS, "norm": NORMS, "encoder": ENCODERS}
BANDS, CLASSES = Range(1, 65535), Range(2, 255)


def check_options(network: Any) -> None:
    """Raise ConfigError for the first option of a network that no network can have."""
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
    groups = groups_of(layer.out_channels)
    return [
        Node(f"{name}.conv{number}", layer, (source,) if source else ()),
        Node(f"{name}.norm{number}", Norm(norm, groups=groups)),
        Node(f"{name}.act{number}", Activation(0.0)),
    ]


def check_groups(norm: str, widths: list[tuple[str, int]], base_channels: int) -> None:
    """Raise ConfigError where the channels of a place, (its name, their number), do not fall into the norm's groups."""
    for place, channels in widths if norm == "group" else ():
        if channels % groups_of(channels):
            raise ConfigError(
                f"model.norm is group, but {place} has {channels} channels, which do not divide into "
                f"{groups_of(channels)} groups, with model.base_channels {base_channels}; give 1, 2, 4 or a multiple "
                "of 8"
            )
