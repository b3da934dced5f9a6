"""A communicator without peers: what one rank of many would do with others is written down, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tiledseg.comm.transports.collectives import Communicator, SerialCommunicator, check_groups
from tiledseg.comm.transports.point_to_point import Message
from tiledseg.comm.transports.work import Work


@dataclass
class Doings:
    """The deeds of one rank: the groups that it is in, the bytes of its messages to and from each peer, and those of
    its sums over each group (none: all ranks), in order."""

    groups: list[tuple[int, ...]] = field(default_factory=list)
    sent: dict[int, list[int]] = field(default_factory=dict)
    received: dict[int, list[int]] = field(default_factory=dict)
    summed: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class RehearsedCommunicator(Communicator):
    """Rank `rank` of `size`. Every operation ends at once: sums and broadcasts leave their tensors as they are."""

    def __init__(self, rank: int, size: int, doings: Doings, group: tuple[int, ...] = ()) -> None:
        self.rank, self.size, self._doings, self._group = rank, size, doings, group

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        self._doings.summed.setdefault(self._group, []).append(tensor.numel() * tensor.element_size())
        return Work()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Nothing comes."""

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the value as if all had given the same."""
        return [value] * self.size

    def barrier(self) -> None:
        """Nobody to wait for."""

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        check_groups(groups, self.size)
        own = next((tuple(group) for group in groups if self.rank in group), ())
        if len(own) < 2:
            return SerialCommunicator()
        self._doings.groups.append(own)
        return RehearsedCommunicator(own.index(self.rank), len(own), self._doings, own)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        for messages, lists in ((sends, self._doings.sent), (receives, self._doings.received)):
            for peer, tensor in messages:
                lists.setdefault(peer, []).append(tensor.numel())
        return lambda: None

    def close(self) -> None:
        """Nothing to end."""


def unmatched(doings: dict[int, Doings]) -> list[str]:
    """Return a line for each message that the other rank does not await, and each sum that is not that of the others
    of its group, in order and bytes. Pure."""
    faults = []
    first: dict[tuple[int, ...], tuple[int, list[int]]] = {}
    for rank, own in doings.items():
        for group, sums in own.summed.items():
            first.setdefault(group, (rank, sums))
    for group, (other, theirs) in first.items():
        for rank in group or doings:
            if rank in doings and (sums := doings[rank].summed.get(group, [])) != theirs:
                faults.append(f"rank {rank} sums {sums} bytes over its group, and rank {other} {theirs}")
    for rank, own in doings.items():
        for peer in sorted(own.sent.keys() | {p for p in own.received if p in doings}):
            sent, awaited = own.sent.get(peer, []), doings[peer].received.get(rank, []) if peer in doings else None
            if sent != awaited:
                faults.append(f"rank {rank} sends rank {peer} messages of {sent} bytes, which awaits {awaited}")
    return faults
