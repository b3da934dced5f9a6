"""Messages between pairs of ranks, for halo exchanges and stages, over any transport.

The rule: the peer starts a receive of as many bytes for every send, and two ranks start the messages between them in
the same order. Nothing can deadlock under it: `start` posts all receives and sends before anything waits, so no rank
waits for a message whose sender waits for it. Several exchanges may be in flight. On CPUs they may be waited for in any
order; on GPUs with NCCL they run in the order of their starts.

Messages of no bytes are not sent: both ends know the size. For a transport that cannot read GPU memory, tensors are
staged in pinned host buffers: copied out when the exchange starts, and in when it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from tiledseg.comm.doing import name_ranks
from tiledseg.memory.device import CPU, Stopwatch, is_gpu, least


class Work:
    """A sum or an exchange of messages in flight. `finish` waits for it; None: nothing to wait for."""

    def __init__(self, finish: Callable[[], object] | None = None) -> None:
        self.finish = finish

    def wait(self) -> None:
        """Return once the tensors hold the result; on a GPU, once its current stream will see it. A second call does
        nothing, since the tensors may have changed. Raises CommunicationError for a lost peer."""
        if self.finish is not None:
            self.finish()
            self.finish = None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 view."""
    if tensor.dtype == torch.uint8 and tensor.dim() == 1:
        return tensor
    assert tensor.is_contiguous(), f"a tensor with strides {tensor.stride()} has no bytes in one piece"
    # A single element counts as contiguous whatever its stride is, which reshape would keep and view would refuse.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Message(NamedTuple):
    """A contiguous tensor of any shape and dtype, sent to rank `peer` or received from it.

    `peer`: a rank of the communicator. Only bytes travel: both ends know shape and dtype.
    """

    peer: int
    tensor: torch.Tensor


@dataclass
class MessageMeter:
    """Messages and bytes that this rank has sent, and the seconds that it or its GPU has waited for messages."""

    messages: int = 0
    bytes: int = 0
    waits: Stopwatch = field(default_factory=Stopwatch, compare=False)

    @property
    def seconds(self) -> float:
        """The seconds waited so far. Synchronises with the GPU: read at the end of a step."""
        return self.waits.seconds()

    def reset(self) -> None:
        self.messages, self.bytes = 0, 0
        self.waits.reset()


class Carrier(Protocol):
    """The methods of `collectives.Communicator` that messages need."""

    def take_turn(self, owner: object) -> None: ...

    def started(self, work: Work) -> Work: ...

    def talk(self, what: str, words: str, *values: object) -> AbstractContextManager[None]: ...

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], object]: ...

    def reads(self, tensor: torch.Tensor) -> bool: ...


class PointToPoint:
    """A channel for messages among the ranks of a communicator, with its own meter."""

    def __init__(self, carrier: Carrier) -> None:
        self.meter = MessageMeter()
        self._carrier = carrier

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        """Post all messages, of contiguous tensors, and return. `.wait()` returns once `receives` are filled.

        The caller must not use the tensors until then. Raises CommunicationError, here or in `.wait()`, for a lost
        peer.
        """
        sends, receives = ([each for each in messages if each.tensor.numel()] for messages in (sends, receives))
        if not sends and not receives:
            return Work()
        outgoing, incoming = ([Message(m.peer, self._carried(m.tensor)) for m in each] for each in (sends, receives))
        for tensor, buffer in _staged(sends, outgoing):
            buffer.copy_(as_bytes(tensor))  # not asynchronous: posted below
        carried = _Messages([*outgoing, *incoming])  # kept until the transport has read and written them
        carrier = self._carrier
        carrier.take_turn((carrier, "messages"))
        # The first message of a pair connects it, which may need both ranks.
        with carrier.talk("exchange", "messages with %s", carried):
            finish = carrier.post(outgoing, incoming)
        self.meter.messages += len(outgoing)
        self.meter.bytes += sum(tensor.numel() for _, tensor in outgoing)
        device = next((tensor.device for _, tensor in (*sends, *receives) if is_gpu(tensor.device)), CPU)  # that waits
        staged = _staged(receives, incoming)

        def wait() -> None:
            with self.meter.waits.running(device):
                with carrier.talk("exchange", "messages with %s", carried):
                    finish()
                for tensor, buffer in staged:
                    as_bytes(tensor).copy_(buffer)  # not asynchronous: torch hands the buffer out again

        return carrier.started(Work(wait))

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes of `tensor`, or a host buffer of as many."""
        if self._carrier.reads(tensor):
            return as_bytes(tensor)
        size = tensor.numel() * tensor.element_size()
        return torch.empty(size, dtype=torch.uint8, pin_memory=is_gpu(tensor.device))


class _Messages(list[Message]):
    """Messages whose text names their ranks, formatted only when it is read."""

    def __str__(self) -> str:
        return name_ranks(sorted({message.peer for message in self}))


def _staged(messages: Sequence[Message], carried: Sequence[Message]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of a tensor and its host buffer, for the tensors that have one."""
    pairs = zip(messages, carried, strict=True)
    return [(m.tensor, c.tensor) for m, c in pairs if m.tensor.data_ptr() != c.tensor.data_ptr()]


def measure_link(messages: PointToPoint, peer: int, device: torch.device) -> tuple[float, float]:
    """Return the latency (seconds) and the seconds a byte of the link between rank 0 and another rank: the quickest of
    some messages there and back. Both ranks call it, with the other as `peer`; rank 0 begins."""

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
