"""The blocks of one rank in the place of ranks that share an image: sums over all of them, one block after the other.

A layer that takes statistics of the image sums them over ranks by one call forward and one backward (see
`models.normalise.Ranks`). Blocks come one at a time, so a sum is made in two turns: first each block adds its part,
then each is given the whole. Backward the first turn is that of the layer itself, which is told that the others'
sum is zero; what the sum adds to its input's gradient follows when the segment before it is differentiated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from tiledseg.comm.transports.work import DoneWork, Work


class Doing(Enum):
    """What a block does with sums: it adds to the forward ones, or is given them; adds to the backward ones, or is
    given those."""

    MEASURE = "measure"
    COMPUTE = "compute"
    DIFFERENTIATE = "differentiate"
    RETURN = "return"


@dataclass
class Sums:
    """What the blocks of an image have added up, by the layer's node."""

    forward: dict[int, torch.Tensor] = field(default_factory=dict)
    backward: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Turn:
    """Which block is at work, of how many, on what, and its image's sums."""

    block: int = 0
    blocks: int = 1
    doing: Doing = Doing.COMPUTE
    sums: Sums = field(default_factory=Sums)


@dataclass
class BlockRanks:
    """What the layer of node `k` takes for the ranks of its image."""

    turn: Turn
    k: int

    @property
    def rank(self) -> int:
        return self.turn.block

    @property
    def size(self) -> int:
        return self.turn.blocks

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        """Adds `tensor` to the sums, or puts them into it: as the turn is."""
        sums = self.turn.sums
        match self.turn.doing:
            case Doing.MEASURE:
                self._add(sums.forward, tensor)
            case Doing.DIFFERENTIATE:
                self._add(sums.backward, tensor)
                tensor.zero_()
            case Doing.COMPUTE:
                assert self.k in sums.forward, "all blocks have been measured"
                tensor.copy_(sums.forward[self.k])
            case Doing.RETURN:
                assert self.k in sums.backward, "all blocks have been differentiated"
                tensor.copy_(sums.backward[self.k])
        return DoneWork()

    def _add(self, sums: dict[int, torch.Tensor], tensor: torch.Tensor) -> None:
        if self.k in sums:
            sums[self.k].add_(tensor)
        else:
            sums[self.k] = tensor.clone()
