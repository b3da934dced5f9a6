"""The numbers of the classes of a synthetic scene."""

from __future__ import annotations

OPEN, ROAD, BUILDING, TREE, WATER = range(5)
