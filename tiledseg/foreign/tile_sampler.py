"""Which tiles a rank of somebody else's training loop takes: `raster.samples.sampling`'s order, dealt in turn."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch.utils import data

from tiledseg.config.arguments import checked
from tiledseg.errors import ConfigError
from tiledseg.foreign.tile_dataset import TileDataset
from tiledseg.raster.samples.sampling import Sampler

UNEVEN = ("refuse", "drop", "differ")


class TileSampler(data.Sampler[int]):
    """The indices of a `TileDataset` for one rank of `size`, shuffled by (seed, epoch) alone.

    The law: tiles follow each other in one order, whatever `size`, and are dealt in turn. So each tile occurs once an
    epoch, and B tiles a step are the same ones for every number of ranks that divides B: those of `tiledseg train` with
    that seed and `train.tiles_per_step` B.

    `rank` and `size`: those of torch's process group where there is one, else 0 of 1. `uneven`, where `size` does not
    divide the number of tiles: `refuse`; `drop` leaves out the last few of an epoch, others each time; `differ` gives
    some ranks a tile more (a loop that communicates at every step then waits forever, without torch's Join).

    Raises ConfigError for a rank that there is not, and where ranks would get unevenly many tiles.
    """

    @checked
    def __init__(
        self,
        dataset: TileDataset,
        seed: int = 0,
        rank: int | None = None,
        size: int | None = None,
        uneven: str = "refuse",
    ) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if joined else 0
        self.size = size if size is not None else dist.get_world_size() if joined else 1
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank is {self.rank} of {self.size}; ranks count from 0, and are fewer than size")
        if type(seed) is not int:
            raise ConfigError(f"seed is {seed!r}; give a whole number")
        if uneven not in UNEVEN:
            raise ConfigError(f"uneven is '{uneven}'; give one of {', '.join(UNEVEN)}")
        count = len(dataset)
        if uneven == "refuse" and count % self.size:
            raise ConfigError(
                f"{count} tiles are dealt to {self.size} ranks, {count % self.size} of which would get one more; give "
                "another grid or number of ranks, or uneven drop or differ"
            )
        if uneven == "drop" and count < self.size:
            raise ConfigError(f"{count} tiles are dealt to {self.size} ranks, and uneven drop leaves none; cut finer")
        self.epoch = 0
        self._stop = count - count % self.size if uneven == "drop" else count
        counts = dataset.tiles_per_image
        self._first = [sum(counts[:image]) for image in range(len(counts))]
        self._sampler = Sampler(counts, seed, tiles_per_step=1)

    @checked
    def set_epoch(self, epoch: int) -> None:
        """The epoch, from 0, whose order the next iteration has. Call it on every rank before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(range(self.rank, self._stop, self.size))

    def __iter__(self) -> Iterator[int]:
        order = [self._first[image] + tile for ((image, tile),) in self._sampler.steps(self.epoch)]
        return iter(order[self.rank : self._stop : self.size])
