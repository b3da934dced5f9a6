"""The classes of a synthetic scene: their numbers, names and colours; and what stands for no data."""

from __future__ import annotations

OPEN, ROAD, BUILDING, TREE, WATER = range(5)
CLASSES = ("field", "road", "building", "tree", "water")
CLASS_COLOURS = ((158, 188, 94), (70, 70, 74), (196, 64, 50), (24, 104, 44), (44, 110, 196))
IGNORED = 255
