"""What a network is to those who plan, build and run it: its graph, and how many bands and classes it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

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


class Pretrainable(Network, Protocol):
    """A network whose encoder is a published one, for which files of weights go round."""

    def file_names(self, held: Mapping[str, object]) -> dict[str, str]:
        """What a file that holds tensors of these names calls the encoder's nodes: node to module of the file."""
