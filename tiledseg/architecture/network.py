"""What a network is to those who plan, build and run it: its graph, and how many bands and classes it has."""

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
        """Its name and options, for the user, in a line or two."""

    def graph(self) -> Graph:
        """Its nodes."""


@runtime_checkable
class Pretrainable(Network, Protocol):
    """A network whose encoder is a published one, for which files of weights go round."""

    def file_names(self, normed: bool) -> dict[str, str]:
        """What a file calls the encoder's nodes, from the input on: node to module of the file. `normed`: whether the
        file's network has batch norms."""
