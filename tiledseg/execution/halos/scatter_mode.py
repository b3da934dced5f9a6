"""Halo mode `scatter`: one rank of an image reads it, once, for all of its ranks.

For rasters that many readers would wait for, or that not all can reach: the others open no raster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from tiledseg.comm.transports.point_to_point import Message
from tiledseg.execution.halos.halo_modes import ExchangeMode
from tiledseg.execution.halos.part import Part
from tiledseg.geometry.sharing.blocks import exchange_block
from tiledseg.raster.samples.dataset import Sample, settled


class ScatterMode(ExchangeMode):
    """As mode exchange, but the first rank of an image reads the blocks of all, one after the other, each pixel once.

    Deadlock cannot arise: the ranks of an image come to its parts in one order. At each the reader sends block after
    block, to ranks that wait for it alone.
    """

    @property
    def reads_its_own(self) -> bool:
        return False

    @property
    def reader(self) -> bool:
        at = self._axes.position
        return at is not None and (at.row, at.col) == (0, 0)

    def reads(self, part: Part) -> tuple[Part, ...]:
        image = self._images[part.image]
        return tuple(part._replace(tile=exchange_block(image, *place)) for place in np.ndindex(image.shape))

    def deliver(self, part: Part, read: Iterator[Sample], empty: Callable[[Part], Sample]) -> Sample:
        messages = self._axes.point_to_point
        if not self.reader:
            sample = empty(part)
            messages.start([], _messages(self._axes.rank_at(0, 0), sample)).wait()
            return sample
        own = next(read)
        for block in self.reads(part)[1:]:
            messages.start(_messages(self._axes.rank_at(*block.tile.position), settled(next(read))), []).wait()
        return own


def _messages(peer: int, sample: Sample) -> list[Message]:
    """The arrays of a sample, each in one piece, to or from another rank."""
    arrays = sample.pixels_CHW, sample.valid_HW, *([] if sample.around_HW is None else [sample.around_HW])
    return [Message(peer, torch.from_numpy(np.ascontiguousarray(array))) for array in arrays]
