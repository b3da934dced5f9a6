"""What blocks of one rank read of another's: strips of values after a tensor is made, of gradients before it is taken.

One message a tensor, way and pair of ranks. It cannot deadlock: the ranks of an image share the program, so all of them
carry the same tensors in the order of the segments, backward in the opposite one; of each, all receives and sends are
posted before anything is waited for, as `comm.transports.point_to_point` asks. No message lies between the blocks of a
segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tiledseg.comm.axes import Axes
from tiledseg.comm.transports.point_to_point import Message
from tiledseg.spatial.blocks.program import BlockProgram, Strip
from tiledseg.spatial.blocks.store import BlockGradients, BlockValues, Like


class BlockMessages:
    """Carries strips of one image's blocks between the ranks that share it."""

    def __init__(self, program: BlockProgram, axes: Axes, values: BlockValues, gradients: BlockGradients) -> None:
        self._program, self._axes = program, axes
        self._values, self._gradients = values, gradients

    def values(self, tensor: int) -> None:
        """Brings what this rank's blocks read of others'. Collective over the ranks of the image."""
        traffic = self._program.traffic.get(tensor)
        if traffic is None:
            return
        like = self._values.like(tensor)
        outgoing = {
            peer: _packed([self._values.strip(tensor, strip) for strip in strips])
            for peer, strips in traffic.sends.items()
        }
        for peer, flat in self._exchange(outgoing, traffic.receives, like).items():
            for strip, x_BCHW in _unpacked(flat, traffic.receives[peer], like):
                self._values.receive(tensor, strip, x_BCHW)

    def gradients(self, tensor: int) -> None:
        """Takes the gradients of what was brought back to those who own it. Collective as `values`."""
        traffic = self._program.traffic.get(tensor)
        if traffic is None:
            return
        like = self._values.like(tensor)
        outgoing = {
            peer: _packed([self._gradients.leave(tensor, strip, like) for strip in strips])
            for peer, strips in traffic.receives.items()
        }
        for peer, flat in self._exchange(outgoing, traffic.sends, like).items():
            for strip, g_BCHW in _unpacked(flat, traffic.sends[peer], like):
                self._gradients.receive(tensor, strip, g_BCHW)

    def _exchange(
        self, outgoing: Mapping[int, torch.Tensor], receives: Mapping[int, Sequence[Strip]], like: Like
    ) -> dict[int, torch.Tensor]:
        incoming = {
            peer: torch.empty(sum(map(like.values_of, strips)), dtype=like.dtype, device=like.device)
            for peer, strips in receives.items()
        }
        sends, arrivals = (
            [Message(self._rank(peer), flat) for peer, flat in way.items()] for way in (outgoing, incoming)
        )
        self._axes.point_to_point.start(sends, arrivals).wait()
        return incoming

    def _rank(self, peer: int) -> int:
        """The rank of the job that is number `peer` of the image."""
        return self._axes.rank_at(*divmod(peer, self._program.ranks.cols))


def _packed(strips_BCHW: Sequence[torch.Tensor]) -> torch.Tensor:
    """Strips one after the other, each channels last."""
    return torch.cat([x_BCHW.detach().permute(0, 2, 3, 1).reshape(-1) for x_BCHW in strips_BCHW])


def _unpacked(flat: torch.Tensor, strips: Sequence[Strip], like: Like) -> list[tuple[Strip, torch.Tensor]]:
    parts = flat.split([like.values_of(strip) for strip in strips])
    return [(strip, like.shaped(part, strip)) for strip, part in zip(strips, parts, strict=True)]
