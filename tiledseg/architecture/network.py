"""What a network is to those who plan, build and run it: its graph, and how many bands and classes it has."""

from __future__ import annotations

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

    def graph(self) -> Graph:
        """Its nodes."""
