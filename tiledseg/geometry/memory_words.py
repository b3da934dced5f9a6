"""The words of a memory policy: what becomes of each tensor of a network; see `memory_policy`, which makes policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.errors import ConfigError

KEEP, REBUILD, OFFLOAD = "keep", "rebuild", "offload"
WORDS = KEEP, REBUILD, OFFLOAD


class LossBytes(NamedTuple):
    """The bytes of each pixel of the first output that a loss needs beyond the usual one: kept until its gradients are
    computed, and at the peak until then."""

    kept: float = 0.0
    peak: float = 0.0


USUAL_LOSS = LossBytes()


@dataclass(frozen=True)
class MemoryPolicy:
    """Words by the tensors' numbers (0 is the network's input), and, `inside`, by the nodes'.

    Raises ConfigError for another word.
    """

    tensors: tuple[str, ...]
    inside: tuple[str, ...]

    def __post_init__(self) -> None:
        other = sorted({*self.tensors, *self.inside} - {*WORDS})
        if other:
            raise ConfigError(f"a memory policy says '{other[0]}'; give one of {', '.join(WORDS)}")

    @property
    def keeps_all(self) -> bool:
        """True if nothing is done: autograd keeps what it keeps."""
        return {*self.tensors, *self.inside} <= {KEEP}
