"""The configuration's groups `parallel`, the spread of the work over ranks, and `memory`, against a lack of it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

from tiledseg.config.checks import (
    AUTO,
    MOST,
    TRANSPORTS,
    Group,
    Need,
    conditional,
    number,
    refuse,
    rows_cols,
    shown,
    word,
)
from tiledseg.config.words import NEVER, RECOMPUTE, SCHEDULES, chunk_ranks
from tiledseg.errors import ConfigError
from tiledseg.units import MOST_BYTES, parse_bytes

HALO_MODES = ("read", "exchange", "layer")
MESH = "auto, or ranks along rows and columns as [R, C]"
FUSION = "auto, whole or a number of layers from 1 on"
BALANCE = "auto, modelled, or layers a stage as [14,24,30,22,12,7]"
_SHARED = Need("halo", "exchange or layer", lambda parallel: parallel.shares_images)
_LAYER = Need("halo", "layer", lambda parallel: parallel.shares_layers)
_IDLE = Need("halo", "exchange or layer", lambda each: each.shares_images or each.stages > 1)
_STAGES = Need("stages", "2 or more", lambda parallel: parallel.stages > 1)


@dataclass
class ParallelConfig(Group):
    """The spread of the work over ranks.

    Args:
        exact: refuse what tiling would change; false accepts it with a warning
        halo: how a rank gets its halo: read (from the raster), exchange (from its neighbours, once) or layer (from its
            neighbours, at each layer that needs one; nothing is computed twice)
        mesh: ranks along rows and columns that share an image, in all modes but read: [R, C], or auto
        fusion: layers that share one exchange in mode layer: 1 (a thin halo each), more, whole (one exchange of the
            input), or auto (by the cost model)
        overlap: in mode layer, compute the interior of convolutions while their halos travel, which is quicker on some
            machines (benchmarks/spatial/README.md)
        stages: ranks that share the network's layers as a pipeline; tiles are its micro-batches
        balance: layers a stage (folded: a chunk) as a list; auto or modelled: by the profile, else an assumed machine
        schedule: 1f1b, gpipe or folded (the encoder's part of a stage and its mirror in the decoder on one rank)
        micro_batches: micro-batches between two flushes of the pipeline (default: all tiles of a step)
        recompute: compute a stage's forward pass again in place of keeping its activations: never, except_last (the
            newest micro-batch) or always, for all stages, or a list with one of them for each
        idle_ranks: accept a job of more ranks than its mesh; the others wait
        transport: auto, nccl, xccl, gloo or mpi
        deadline: seconds without progress of any rank after which the job ends and names a lost rank (default: 600)
        machine: profile of the machine, by which `fusion: auto` chooses: a file of plan --calibrate, or a name of plan
            --machine (docs/how-to/find-settings.md)
    """

    exact: bool = True
    halo: str = word("read", *HALO_MODES)
    mesh: list[int] | str = number(AUTO, 1, MOST, texts=(AUTO,), pair=True, need=_SHARED, remedy=MESH)
    fusion: int | str = number(1, 1, MOST, texts=(AUTO, "whole"), need=_LAYER, remedy=FUSION)
    overlap: bool = conditional(False, _LAYER)
    stages: int = number(1, 1, 4096)
    balance: list[int] | str = number(AUTO, 1, MOST, texts=(AUTO, "modelled"), need=_STAGES, remedy=BALANCE)
    schedule: str = word("1f1b", *SCHEDULES, need=_STAGES)
    micro_batches: int | None = number(None, 1, MOST, need=_STAGES)
    recompute: list[str] | str = word(NEVER, *RECOMPUTE, need=_STAGES)
    idle_ranks: bool = conditional(False, _IDLE)
    transport: str = word("auto", *TRANSPORTS)
    deadline: float | None = number(None, 1.0, 30 * 86400.0)
    machine: str | None = None

    @property
    def shares_images(self) -> bool:
        """Return True if several ranks own parts of one image."""
        return self.halo != "read"

    @property
    def shares_layers(self) -> bool:
        """Return True if the ranks of an image compute each layer together."""
        return self.halo == "layer"

    def check_together(self) -> None:
        self.recompute_modes()
        counts = self.layer_counts()
        chunks = len(chunk_ranks(self.schedule, self.stages))
        if counts is not None and len(counts) != chunks:
            several = f", which has {chunks} chunks when {self.schedule}" if chunks != self.stages else ""
            raise ConfigError(
                f"parallel.balance has {len(counts)} parts, but parallel.stages is {self.stages}{several}; give "
                f"{chunks} counts of layers, or auto"
            )

    def layer_counts(self) -> tuple[int, ...] | None:
        """Return the layers of each chunk, or None where the program chooses them."""
        return None if isinstance(self.balance, str) else tuple(self.balance)

    def recompute_modes(self) -> tuple[str, ...]:
        """Return one mode for each stage."""
        if isinstance(self.recompute, str):
            return (self.recompute,) * self.stages
        if len(self.recompute) != self.stages:
            raise ConfigError(
                f"parallel.recompute has {len(self.recompute)} parts, but parallel.stages is {self.stages}; give one "
                "for each stage, or one word for all"
            )
        return tuple(self.recompute)

    def fusion_depth(self) -> int | None:
        """Return the layers an exchange, or None for auto. For whole they are more than any network has."""
        if isinstance(self.fusion, str):
            return None if self.fusion == AUTO else MOST
        return self.fusion


NONE = "none"
ALL = "all"
REBUILDS = (AUTO, NONE, ALL)
OFFLOAD = (NONE, AUTO, ALL)
HOST = "host"
MOST_BLOCKS = 4096  # along a side
BUDGET = "auto, or bytes as 16GiB"
BLOCKS = "none, auto, a number of rows and columns of blocks, or [rows, cols]"
_WHOLE = Need("blocks", "none or auto", lambda memory: not memory.in_blocks)
_STORED = Need(
    "blocks", "a number, or memory.offload all", lambda each: each.in_blocks or each.may_block or each.offload != NONE
)


@dataclass
class MemoryConfig(Group):
    """Measures against a lack of memory; none changes the result.

    Args:
        budget: bytes that a rank may use for a step, as 16GiB, or auto (a part of the free memory). A step that needs
            more recomputes tensors in the backward pass, or goes in blocks
        recompute: tensors to recompute in the backward pass: auto (as the budget demands), none, or all (but skips
            and ends of levels)
        blocks: blocks of a tile that a rank computes one after the other, norms over the image included: none, Q, [R,
            C], or auto. With auto, none where another way meets the budget in less time, else the fewest that fit
        offload: activations that leave memory for `store` until the backward pass: none, all (but those on their way),
            or auto (as the budget demands, where that is quicker than recomputing)
        store: place of blocks and of offloaded tensors: host (memory, for a GPU's tensors), or a folder on a local disk
            (for a CPU's), in a file without a name
    """

    budget: int | str = number(AUTO, 1, MOST_BYTES, remedy=BUDGET)
    recompute: str = word(AUTO, *REBUILDS, need=_WHOLE)
    offload: str = word(NONE, *OFFLOAD, need=_WHOLE)
    blocks: int | list[int] | str = number(AUTO, 1, MOST_BLOCKS, texts=(NONE, AUTO), pair=True, remedy=BLOCKS)
    store: str = conditional(HOST, _STORED)

    def check_together(self) -> None:
        self.bytes()
        if not self.store:
            raise ConfigError("memory.store is empty; give host, or a folder on a local disk")
        if self.offload == AUTO and self.recompute != AUTO:
            fixed = f"memory.recompute is {self.recompute}, which leaves nothing to choose"
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
    def in_file(self) -> bool:
        """Return True if blocks, or offloaded tensors, lie in a file."""
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
