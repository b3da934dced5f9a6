"""The configuration's group `memory`: networks and images that do not fit the memory."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

from tiledseg.config.checks import AUTO, Group, number, refuse, rows_cols, shown, word
from tiledseg.config.words import RECOMPUTE as MODES
from tiledseg.errors import ConfigError
from tiledseg.units import MOST_BYTES, parse_bytes

NONE = "none"
RECOMPUTE = (AUTO, NONE, "compact", "all")
ALL = "all"
OFFLOAD = (NONE, AUTO, ALL)
HOST = "host"
MOST_BLOCKS = 4096  # along a side
BUDGET = "auto, or bytes as 16GiB"
BLOCKS = "none, auto, a number of rows and columns of blocks, or [rows, cols]"


@dataclass
class MemoryConfig(Group):
    """Measures against a lack of memory; none changes the result.

    Args:
        budget: bytes that a rank may use for a step, as 16GiB, or auto (a part of what is free); where a step needs
            more, tensors are computed once more in the backward pass in place of being kept, or tiles go in blocks
        recompute: what is computed once more in the backward pass in place of keeping it: auto (what the budget
            demands), none, compact (what is nearly free: concatenations, upsamplings, pooled tensors, norms with their
            activations), or all (convolutions too, but for skips and the ends of levels); the words of stages, such as
            always, stand for parallel.recompute
        blocks: blocks of a tile that a rank computes one after the other, norms over the image included: none, Q,
            [R, C], or auto (none where the budget can be met otherwise in less time, else the fewest that fit)
        offload: what autograd keeps for the backward pass leaves memory for `store` meanwhile: none of it, all but what
            is on its way, or auto (what the budget demands, where that is quicker than computing it once more)
        store: where blocks lie meanwhile, or what has left: host (memory, which a GPU's tensors leave for), or a folder
            on a local disk (which a CPU's do), in which a file without a name is made
    """

    budget: int | str = number(AUTO, 1, MOST_BYTES, remedy=BUDGET)
    recompute: list[str] | str = word(AUTO, *RECOMPUTE, *MODES)
    offload: str = word(NONE, *OFFLOAD)
    blocks: int | list[int] | str = number(AUTO, 1, MOST_BLOCKS, texts=(NONE, AUTO), pair=True, remedy=BLOCKS)
    store: str = HOST

    def check_together(self) -> None:
        self.bytes()
        if not isinstance(self.recompute, str) or self.recompute in MODES:
            refuse("memory.recompute", self.recompute, "stages have a key of their own", "set parallel.recompute")
        blocks = f"memory.blocks is {shown(self.blocks)}"
        if self.recompute not in (AUTO, NONE) and self.in_blocks:
            again = f"{blocks}, which computes blocks once more as it is"
            refuse("memory.recompute", self.recompute, again, "leave recompute out")
        if not self.store:
            raise ConfigError("memory.store is empty; give host, or a folder on a local disk")
        if self.in_file and not (self.in_blocks or self.may_block or self.offloads):
            other = f"memory.recompute {shown(self.recompute)}" if self.blocks == AUTO else "memory.blocks none"
            unused = f"with {other} and memory.offload none nothing would lie there"
            refuse("memory.store", self.store, unused, "leave one of them out")
        if self.offloads and self.in_blocks:
            refuse("memory.offload", self.offload, f"{blocks}, which keeps nothing but blocks", "leave offload out")
        if self.chooses_offload and self.recompute != AUTO:
            fixed = f"memory.recompute is {shown(self.recompute)}, which leaves nothing to choose"
            refuse("memory.offload", AUTO, fixed, "leave recompute out, or give offload all")

    @property
    def in_blocks(self) -> bool:
        """Return True if tiles are computed in blocks whatever the budget."""
        return self.blocks not in (AUTO, NONE)

    @property
    def may_block(self) -> bool:
        """Return True if the plan may take blocks: no other way to meet the budget is given."""
        return self.blocks == AUTO and self.recompute == AUTO and self.offload != ALL

    @property
    def offloads(self) -> bool:
        """Return True if what autograd keeps leaves memory."""
        return self.offload != NONE

    @property
    def chooses_offload(self) -> bool:
        """Return True if the plan chooses what leaves."""
        return self.offload == AUTO

    @property
    def in_file(self) -> bool:
        """Return True if blocks, or what has left, lie in a file."""
        return self.store != HOST

    def check_folder(self) -> None:
        """Raise ConfigError for a store in which no file can be written."""
        if not self.in_file:
            return
        try:
            with tempfile.TemporaryFile(dir=self.store) as file:
                file.write(bytes(1 << 12))
        except OSError as error:
            raise ConfigError(
                f"memory.store is {self.store}, which is no folder to write to ({error.strerror}); "
                "give one on a local disk"
            ) from None

    def bytes(self) -> int | None:
        """Return the bytes of the budget; None for auto."""
        if self.budget == AUTO:
            return None
        try:
            size = parse_bytes(str(self.budget))
        except ConfigError:
            size = 0
        if not 1 <= size <= MOST_BYTES:
            raise ConfigError(f"memory.budget is {shown(self.budget)}; give {BUDGET}")
        return size

    def blocks_shape(self) -> tuple[int, int] | None:
        """Return (rows, cols), or None for auto and none."""
        return rows_cols(self.blocks)
