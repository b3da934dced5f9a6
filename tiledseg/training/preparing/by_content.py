"""The steps of a run whose tiles or windows are drawn by what the labels hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tiledseg.raster.samples.content import Content, ContentSampler, Unit, square_units, tile_units
from tiledseg.raster.samples.drawn_steps import DrawnTiles, DrawnWindows
from tiledseg.raster.samples.sampling import Sampler
from tiledseg.training.preparing.preparation import Preparation

LEAST_SQUARE = 16  # pixels along the side of a region of labels, where windows are drawn by them


def content_units(preparation: Preparation) -> list[Unit]:
    """The regions whose labels are counted where tiles or windows are drawn by them."""
    steps = preparation.sampler
    if isinstance(steps, DrawnWindows):
        return square_units(steps.drawer.shapes, max(LEAST_SQUARE, steps.side // 2))
    return tile_units(preparation.training.tilings)


def with_content(preparation: Preparation, units: Sequence[Unit], counts: NDArray[np.int64]) -> Preparation:
    """The preparation with steps that are drawn by what was counted. Raises ConfigError where too little is left."""
    steps, asked = preparation.sampler, preparation.recipe.by_content
    assert asked is not None, "labels are counted where it is asked for"
    content = Content(tuple(region for unit in units for region in unit), counts, asked)
    if isinstance(steps, DrawnWindows):
        return replace(preparation, sampler=replace(steps, content=content))
    assert isinstance(steps, DrawnTiles), "there are no other steps"
    assert isinstance(steps.sampler, Sampler), "nothing was drawn by content before"
    drawn = replace(steps, sampler=ContentSampler(steps.sampler, content), tilings=preparation.plan.tilings)
    return replace(preparation, sampler=drawn)
