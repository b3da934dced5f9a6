"""Which pixels of its images a run trains on, and which it validates on: blocks, their size, a gap between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph
from tiledseg.planning.run.norms import measuring, said
from tiledseg.raster.ground_size import along
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.samples.spatial_split import Cut, SpatialSplit
from tiledseg.units.quantities import Length, blocks_of, parse_length


class SplitAsked(NamedTuple):
    """As the keys of the configuration have it: [R, C] `blocks` or the side of one, the `share` of them that is
    validated on, and the `gap`: auto, pixels, or a length."""

    blocks: list[int] | str
    share: float
    gap: int | str
    seed: int


def split_of(
    asked: SplitAsked,
    graph: Graph,
    halo: int,
    reach: float,
    exact: bool,
    infos: Sequence[RasterInfo],
    keyed: bool = True,
) -> tuple[SpatialSplit, tuple[str, ...]]:
    """The split of the images into blocks, and what is to be said of it. `halo`: the network's, in pixels; `reach`: how
    many of the raster an augmentation may make of one; `keyed`: as of `norm_fault`.

    Raises ConfigError where a layer sees whole images, which no gap keeps apart, unless not `exact`.
    """
    seeing = measuring(graph)
    if seeing and exact:
        raise ConfigError(
            f"data.split is {asked.blocks}, but {said(seeing[0], keyed)}: its statistics over an image hold pixels "
            f"that are validated on; use {'model.norm none or pixel, ' if keyed else ''}data.val_images, or accept it: "
            "parallel.exact false"
        )
    notes: tuple[str, ...] = ()
    if seeing:
        notes += (f"data.split: {said(seeing[0], keyed)}, and sees all blocks of an image",)
    auto = math.ceil(halo * reach) + (reach != 1)  # in pixels of the raster, where it is shown smaller or rotated
    cuts = tuple(Cut(info.shape, _blocks(asked.blocks, info), _gap(asked.gap, auto, info)) for info in infos)
    if min(min(cut.gap) for cut in cuts) < auto:
        notes += (f"data.split_gap is {asked.gap}, below {auto} px: outputs validated on see pixels trained on",)
    return SpatialSplit(cuts, asked.share, asked.seed), notes


def _blocks(split: list[int] | str, info: RasterInfo) -> tuple[int, int]:
    """How many blocks an image is cut into, along rows and columns."""
    if not isinstance(split, str):
        return split[0], split[1]
    side = parse_length(split)
    assert side is not None, "the configuration is checked"
    height, width = (blocks_of(*pair) for pair in zip(info.shape, along(side, info, "data.split"), strict=True))
    return height, width


def _gap(gap: int | str, auto: int, info: RasterInfo) -> tuple[int, int]:
    """In pixels, along rows and columns."""
    length = parse_length(gap) if isinstance(gap, str) else Length(gap)
    rows, cols = (auto, auto) if length is None else along(length, info, "data.split_gap")
    return math.ceil(rows), math.ceil(cols)
