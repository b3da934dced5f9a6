"""A layer on one rank's block: the twin of a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiledseg.comm.transports.collectives import Communicator
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.sharing.decomposition import BlockExchange
from tiledseg.models.layers.block import BlockPlace
from tiledseg.spatial.halo_exchange import HaloExchanger


class SpatialLayer:
    """A layer that computes a rank's part of the undivided layer's output.

    `fill`: what stands beyond the tensor's ends in what it reads. `descriptions`: its geometry along rows and columns.
    """

    fill = 0.0
    descriptions: tuple[Layer, Layer]

    def __call__(self, place: BlockPlace, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the outputs `place.given` from what is read of each input: `place.read` of the first."""
        raise NotImplementedError

    def together(
        self, blocks: Sequence[tuple[BlockPlace, torch.Tensor]], ranks: Communicator, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Run a layer that takes statistics over a batch on this rank's blocks of several images, where they are of all
        images of all `ranks`. Collective over these; a rank may have none, and calls `no_gradients` backward. On
        `device` it then sums zeros."""
        raise NotImplementedError

    def no_gradients(self, ranks: Communicator, device: torch.device) -> None:
        """Run the backward pass of `together` on a rank that had no image. Collective."""
        raise NotImplementedError

    def can_overlap(self, place: BlockPlace) -> bool:
        """Return True if `overlapped` serves here."""
        return False

    def overlapped(
        self,
        x_BCHW: torch.Tensor,
        place: BlockPlace,
        exchanger: HaloExchanger,
        exchange: BlockExchange,
    ) -> torch.Tensor:
        """Compute the layer on this rank's own block, halo exchange included, which travels while the interior is
        computed. The same result but for the order of sums. Collective over the ranks of the image."""
        raise NotImplementedError
