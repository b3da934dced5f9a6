"""Messages between pairs of ranks, for halo exchanges and stages, over any transport.

The rule: the peer starts a receive of as many bytes for every send, and two ranks start the messages between them in
the same order. Nothing can deadlock under it: `start` posts all receives and sends before anything waits, so no rank
waits for a message whose sender waits for it. Several exchanges may be in flight. On CPUs they may be waited for in any
order; on GPUs with NCCL they run in the order of their starts.

Messages of no bytes are not sent: both ends know the size. For a transport that cannot read GPU memory, tensors are
staged in pinned host buffers: copied out when the exchange starts, and in when it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiledseg.comm.collectives import Communicator, Message, Work, as_bytes
from tiledseg.comm.doing import name_ranks
from tiledseg.memory.device import CPU, Stopwatch, is_gpu, least


class PointToPoint:
    """A channel for messages among the ranks of a communicator, which share its order with its other operations. Each
    rank makes it. Collective.

    `messages`, `bytes`: those that this rank has sent. `seconds`: those that it or its GPU has waited for messages.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.messages = self.bytes = 0
        self._waits = Stopwatch()
        self._communicator = communicator
        communicator.take_turn(None)
        communicator.connect()

    @property
    def seconds(self) -> float:
        """The seconds waited so far. Synchronises with the GPU: read at the end of a step."""
        return self._waits.seconds()

    def reset(self) -> None:
        self.messages = self.bytes = 0
        self._waits.reset()

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
        communicator = self._communicator
        communicator.take_turn((communicator, "messages"))
        # The first message of a pair connects it, which may need both ranks.
        with communicator.talk("exchange", "messages with %s", carried):
            finish = communicator.post(outgoing, incoming)
        self.messages += len(outgoing)
        self.bytes += sum(tensor.numel() for _, tensor in outgoing)
        device = next((tensor.device for _, tensor in (*sends, *receives) if is_gpu(tensor.device)), CPU)  # that waits
        staged = _staged(receives, incoming)

        def wait() -> None:
            with self._waits.running(device):
                with communicator.talk("exchange", "messages with %s", carried):
                    finish()
                for tensor, buffer in staged:
                    as_bytes(tensor).copy_(buffer)  # not asynchronous: torch hands the buffer out again

        return communicator.started(Work(wait))

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes of `tensor`, or a host buffer of as many."""
        if self._communicator.reads(tensor):
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
