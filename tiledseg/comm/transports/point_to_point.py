"""Messages between pairs of ranks: what a halo exchange is made of, whatever carries it.

The rule: every send has its receive, of as many bytes, started by the peer, and the messages from one rank to another
are started in the same order on both. Why nothing can deadlock under it: `start` posts all its receives and sends
before anything is waited for, and waits for nothing itself. So once all ranks have started the same exchanges in the
same order, every message has its two ends posted, and no rank waits for one whose sender is waiting for it. Exchanges
may be in flight together, and may be waited for in any order on CPUs; on GPUs with NCCL they run in the order in which
they were started.

A message of no bytes is not sent: both ends know its size. A rank sends nothing to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from tiledseg.comm.transports.stopwatch import Stopwatch
from tiledseg.comm.transports.work import DoneWork, Work
from tiledseg.errors import CommunicationError


class Message(NamedTuple):
    """A contiguous tensor of any shape and dtype, sent to rank `peer` or received from it.

    `peer` counts as the communicator that opened the PointToPoint does: ranks of the whole job for the mesh's own. Only
    bytes travel: the two ends agree on shape and dtype.
    """

    peer: int
    tensor: torch.Tensor


@dataclass
class MessageMeter:
    """What this rank has sent, and how long it, or its GPU, has waited for messages."""

    messages: int = 0
    bytes: int = 0
    waits: Stopwatch = field(default_factory=Stopwatch, compare=False)

    @property
    def seconds(self) -> float:
        """Waited so far. Waits for the GPU: ask at the end of a step."""
        return self.waits.seconds()

    def reset(self) -> None:
        self.messages, self.bytes = 0, 0
        self.waits.reset()


class PointToPoint(Protocol):
    """Messages among the ranks of a communicator, by the rule of this module.

    `in_order`: the messages of a rank are carried out one by one, in the order in which it started them, so that one
    that waits for its peer holds up those after it (NCCL).
    """

    meter: MessageMeter

    @property
    def in_order(self) -> bool: ...

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        """Posts all messages and returns; the tensors of `receives` are filled once `.wait()` returns.

        Until then leave the tensors of both alone. Raises CommunicationError, before anything is
        posted, for a peer that is no other rank or a tensor that is not contiguous; and here or from `.wait()` where a
        peer was lost.
        """

    def close(self) -> None:
        """Ends it; every exchange has been waited for. Collective, and before the communicator is closed."""


class SerialPointToPoint:
    """One rank alone, who has nobody to send to."""

    in_order = False

    def __init__(self) -> None:
        self.meter = MessageMeter()

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        """Takes empty lists only; CommunicationError otherwise."""
        check_messages(sends, receives, rank=0, size=1)
        return DoneWork()

    def close(self) -> None:
        """Nothing to end."""


def check_messages(sends: Sequence[Message], receives: Sequence[Message], rank: int, size: int) -> None:
    """Raises CommunicationError where a peer is not another of the `size` ranks, or a tensor is not contiguous."""
    for word, messages in (("send to", sends), ("receive from", receives)):
        for peer, tensor in messages:
            if not 0 <= peer < size or peer == rank:
                raise CommunicationError(
                    f"rank {rank} of {size} cannot {word} rank {peer}: a peer is another rank, counted from 0"
                )
            if not tensor.is_contiguous():
                raise CommunicationError(
                    f"rank {rank} cannot {word} rank {peer} a tensor of shape {tuple(tensor.shape)} with strides "
                    f"{tensor.stride()}: call .contiguous() first"
                )
