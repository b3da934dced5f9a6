"""The protocol of networks: a graph, and the numbers of bands and classes."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tiledseg.geometry.graph import Graph


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
