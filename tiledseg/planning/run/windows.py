"""Training on windows drawn anywhere in the images: what the plan has to know of them."""

from __future__ import annotations

from collections.abc import Sequence

from tiledseg.geometry.halo import Footprint, round_up
from tiledseg.geometry.tiling import Tiling, largest_window, make_tiling
from tiledseg.records import dataclass


@dataclass(frozen=True)
class Windows:
    """Steps of `per_step` windows of `side` x `side` pixels: `exact` ones with the halo that the network needs, or each
    an image of its own, with zeros beyond it."""

    side: int
    per_step: int
    exact: bool

    def tilings(self, rasters: Sequence[tuple[int, int]], footprint: Footprint) -> tuple[Tiling, ...]:
        """What a step computes, each of a single tile: of exact windows the largest of each raster, else all of a
        step."""
        if self.exact:
            sizes = [largest_window(raster, self.side, footprint) for raster in rasters]
        else:
            sizes = [(self.side, self.side)] * self.per_step
        return tuple(make_tiling(size, (1, 1), footprint) for size in sizes)

    def parts(self, rasters: Sequence[tuple[int, int]], footprint: Footprint) -> int:
        """As how many tiles a norm sees an image: 1 where a window shows all that there is."""
        alone = not self.exact or all(max(raster) <= round_up(self.side, footprint.alignment) for raster in rasters)
        return 1 if alone else 2

    @property
    def in_words(self) -> str:
        kind = "with their halos" if self.exact else "as small images of their own: no halo, zeros beyond their edges"
        return f"windows of {self.side} px, {self.per_step} a step, {kind}"
