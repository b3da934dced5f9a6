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
class Turn:
    """Which block is at work, of how many, and on what."""

    block: int = 0
    blocks: int = 1
    doing: Doing = Doing.COMPUTE


@dataclass
class BlockRanks:
    """What one layer takes for the ranks of its image."""

    turn: Turn
    forward: torch.Tensor | None = field(default=None, init=False)
    backward: torch.Tensor | None = field(default=None, init=False)

    @property
    def rank(self) -> int:
        return self.turn.block

    @property
    def size(self) -> int:
        return self.turn.blocks

    def clear(self) -> None:
        """No sums are known."""
        self.forward = self.backward = None

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        """Adds `tensor` to the sums, or puts them into it: as the turn is."""
        match self.turn.doing:
            case Doing.MEASURE:
                self.forward = tensor.clone() if self.forward is None else self.forward.add_(tensor)
            case Doing.DIFFERENTIATE:
                self.backward = tensor.clone() if self.backward is None else self.backward.add_(tensor)
                tensor.zero_()
            case Doing.COMPUTE:
                assert self.forward is not None, "all blocks have been measured"
                tensor.copy_(self.forward)
            case Doing.RETURN:
                assert self.backward is not None, "all blocks have been differentiated"
                tensor.copy_(self.backward)
        return DoneWork()
