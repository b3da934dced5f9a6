"""Messages between pairs of ranks: what a halo exchange is made of, whatever carries it.

The rule: every send has its receive, of as many bytes, started by the peer, and the messages from one rank to another
are started in the same order on both. Nothing can deadlock under it: `start` posts all its receives and sends before
anything is waited for, so no rank waits for a message whose sender is waiting for it. Exchanges may be in flight
together, and may be waited for in any order on CPUs; on GPUs with NCCL they run in the order of their starts.

A message of no bytes is not sent: both ends know its size. A transport that cannot read GPU memory gets pinned host
buffers: a tensor is copied out when its exchange starts and in when it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from tiledseg.comm.doing import name_ranks, waiting
from tiledseg.memory.device import CPU, Stopwatch, is_gpu, least


class Work:
    """A sum, or an exchange of messages, under way. `finish` waits for it; without one there is nothing to wait for."""

    def __init__(self, finish: Callable[[], object] | None = None) -> None:
        self.finish = finish

    def wait(self) -> None:
        """Return once the tensors hold the result; on a GPU, once its current stream will see it. A second call does
        nothing: the tensors may have changed by then. Raises CommunicationError where a peer was lost."""
        if self.finish is not None:
            self.finish()
            self.finish = None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 view; such a one is itself."""
    if tensor.dtype == torch.uint8 and tensor.dim() == 1:
        return tensor
    assert tensor.is_contiguous(), f"a tensor with strides {tensor.stride()} has no bytes in one piece"
    # A single element counts as contiguous whatever its stride is, which reshape would keep and view would refuse.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Message(NamedTuple):
    """A contiguous tensor of any shape and dtype, sent to rank `peer` or received from it.

    `peer` counts as the communicator does: ranks of the whole job for the mesh's own. Only bytes travel: the two ends
    agree on shape and dtype.
    """

    peer: int
    tensor: torch.Tensor


@dataclass
class MessageMeter:
    """The messages and bytes that this rank has sent, and the time that it, or its GPU, has waited for messages."""

    messages: int = 0
    bytes: int = 0
    waits: Stopwatch = field(default_factory=Stopwatch, compare=False)

    @property
    def seconds(self) -> float:
        """The time waited so far. Waits for the GPU: ask at the end of a step."""
        return self.waits.seconds()

    def reset(self) -> None:
        self.messages, self.bytes = 0, 0
        self.waits.reset()


class Carrier(Protocol):
    """The part of a communicator that messages need (see `collectives.Communicator`)."""

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]: ...

    def reads(self, tensor: torch.Tensor) -> bool: ...


class PointToPoint:
    """Messages among the ranks of a communicator, by the rule of this module, with a meter of their own."""

    def __init__(self, carrier: Carrier) -> None:
        self.meter = MessageMeter()
        self._carrier = carrier

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        """Post all messages and return; the tensors of `receives` are filled once `.wait()` returns.

        Until then leave the tensors of both alone, which are contiguous. Raises CommunicationError, here or from
        `.wait()`, where a peer was lost.
        """
        sends, receives = ([each for each in messages if each.tensor.numel()] for messages in (sends, receives))
        if not sends and not receives:
            return Work()
        outgoing, incoming = ([Message(m.peer, self._carried(m.tensor)) for m in each] for each in (sends, receives))
        for tensor, buffer in _staged(sends, outgoing):
            buffer.copy_(as_bytes(tensor))  # not asynchronous: posted below
        carried = _Messages([*outgoing, *incoming])  # kept until the transport has read and written them
        with waiting("messages with %s", carried):  # the first one of a pair connects it, which may take both
            finish = self._carrier.post(outgoing, incoming)
        self.meter.messages += len(outgoing)
        self.meter.bytes += sum(tensor.numel() for _, tensor in outgoing)
        # The device whose work waits.
        device = next((tensor.device for _, tensor in (*sends, *receives) if is_gpu(tensor.device)), CPU)
        staged = _staged(receives, incoming)

        def wait() -> None:
            with self.meter.waits.running(device):
                with waiting("messages with %s", carried):
                    finish()
                for tensor, buffer in staged:
                    as_bytes(tensor).copy_(buffer)  # not asynchronous: torch hands the buffer out again

        return Work(wait)

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes of `tensor`, or a host buffer of as many."""
        if self._carrier.reads(tensor):
            return as_bytes(tensor)
        size = tensor.numel() * tensor.element_size()
        return torch.empty(size, dtype=torch.uint8, pin_memory=is_gpu(tensor.device))


class _Messages(list[Message]):
    """Messages as text: their ranks, named only where somebody asks."""

    def __str__(self) -> str:
        return name_ranks(sorted({message.peer for message in self}))


def _staged(messages: Sequence[Message], carried: Sequence[Message]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tensors that a host buffer stands for, each with it."""
    pairs = zip(messages, carried, strict=True)
    return [(m.tensor, c.tensor) for m, c in pairs if m.tensor.data_ptr() != c.tensor.data_ptr()]


def measure_link(messages: PointToPoint, peer: int, device: torch.device) -> tuple[float, float]:
    """Return latency and seconds a byte of the link to a peer, by the quickest of some messages forth and back: each of
    both ends calls it, and the one of the lower number begins."""

    def seconds(size: int) -> float:
        out = torch.zeros(size, dtype=torch.uint8, device=device)
        back = torch.empty_like(out)

        def forth_and_back() -> None:
            for sends in (peer > 0, peer == 0):
                message = Message(peer, out if sends else back)
                messages.start([message] if sends else [], [] if sends else [message]).wait()

        return least(device, forth_and_back) / 2

    small, large = (seconds(size) for size in (1 << 12, 1 << 23))
    return small, max(0.0, large - small) / ((1 << 23) - (1 << 12))
