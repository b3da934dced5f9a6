"""What all transports do alike for messages: check, count, stage in host memory where they must, and wait.

A transport that cannot read GPU memory is given host buffers: a tensor is copied out when its exchange starts and in
when it is waited for. The buffers are pinned, which the GPU copies to fastest, and kept for the exchanges to come,
since pinning memory costs far more than a copy of a halo.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tiledseg.comm.transports.collectives import as_bytes
from tiledseg.comm.transports.point_to_point import Message, MessageMeter, check_messages
from tiledseg.comm.transports.stopwatch import CPU
from tiledseg.comm.transports.work import DoneWork, Work
from tiledseg.comm.watching.doing import waiting
from tiledseg.comm.watching.verdict import name_ranks


class HostBuffers:
    """Flat uint8 tensors of the host by their size in bytes, handed out and taken back.

    It holds as many of each size as were ever out at once. Pinned where there is a GPU.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, size: int) -> torch.Tensor:
        """A buffer of `size` bytes that nobody else has; what it holds is undefined."""
        free = self._free[size]
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def give_back(self, buffer: torch.Tensor) -> None:
        """Returns a buffer that nobody reads or writes any more."""
        self._free[buffer.numel()].append(buffer)


class _Peers:
    """The ranks of messages, named only where somebody asks."""

    __slots__ = ("_messages",)

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages

    def __str__(self) -> str:
        return name_ranks(sorted({message.peer for message in self._messages}))


@dataclass
class ExchangeWork:
    """Messages under way.

    `finish` waits for the transport, which reads and writes the `carried` tensors until then; None once it has. The
    `staged` receives, pairs of tensor and buffer, are then copied in, and the `lent` buffers go back.
    """

    finish: Callable[[], None] | None
    carried: Sequence[Message]
    staged: Sequence[tuple[torch.Tensor, torch.Tensor]]
    lent: Sequence[torch.Tensor]
    buffers: HostBuffers
    meter: MessageMeter

    def wait(self) -> None:
        """Returns once every receive's tensor is filled and every send's is free; on a GPU, for its current stream.

        Calling it again does nothing. Raises CommunicationError where a peer was lost.
        """
        if self.finish is None:
            return
        with self.meter.waits.running(self._device()):
            with waiting("messages with %s", _Peers(self.carried)):
                self.finish()
            self.finish = None
            for tensor, buffer in self.staged:
                as_bytes(tensor).copy_(buffer)  # not asynchronous: the buffer is handed out again below
        for buffer in self.lent:
            self.buffers.give_back(buffer)
        self.carried = self.staged = self.lent = ()

    def _device(self) -> torch.device:
        """Whose work waits for the messages: of a GPU where it sends from, or receives into, its own memory."""
        for _, tensor in self.carried:
            if tensor.is_cuda:
                return tensor.device
        return next((tensor.device for tensor, _ in self.staged if tensor.is_cuda), CPU)


class BytePointToPoint(ABC):
    """A PointToPoint over a transport that carries bytes: a subclass says how to post them.

    `reads_gpu`: the transport takes GPU memory as it is. `stage_all`: stage host memory too, so that the copies can be
    tested without a GPU.
    """

    in_order = False

    def __init__(self, rank: int, size: int, reads_gpu: bool, stage_all: bool = False) -> None:
        self.meter = MessageMeter()
        self._rank = rank
        self._size = size
        self._reads_gpu = reads_gpu
        self._stage_all = stage_all
        self._buffers = HostBuffers()

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        check_messages(sends, receives, self._rank, self._size)
        sends = [message for message in sends if message.tensor.numel()]
        receives = [message for message in receives if message.tensor.numel()]
        if not sends and not receives:
            return DoneWork()
        lent: list[torch.Tensor] = []
        outgoing = [Message(peer, self._carried(tensor, lent)) for peer, tensor in sends]
        filled = len(lent)
        incoming = [Message(peer, self._carried(tensor, lent)) for peer, tensor in receives]
        staged = _staged(receives, incoming) if len(lent) > filled else ()
        for tensor, buffer in _staged(sends, outgoing) if filled else ():
            buffer.copy_(as_bytes(tensor))  # not asynchronous: posted below
        carried = [*outgoing, *incoming]
        with waiting("messages with %s", _Peers(carried)):  # the first one of a pair connects it, which may take both
            finish = self._post(outgoing, incoming)
        self.meter.messages += len(outgoing)
        for _, tensor in outgoing:
            self.meter.bytes += tensor.numel()
        return ExchangeWork(finish, carried, staged, lent, self._buffers, self.meter)

    @abstractmethod
    def _post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Posts messages of flat uint8 tensors, none empty; what it returns waits for all of them.

        Both raise CommunicationError where a peer was lost. The caller keeps the tensors alive until then.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends these messages; collective, as in `PointToPoint`."""

    def _must_stage(self, tensor: torch.Tensor) -> bool:
        return self._stage_all or (tensor.is_cuda and not self._reads_gpu)

    def _carried(self, tensor: torch.Tensor, lent: list[torch.Tensor]) -> torch.Tensor:
        """The bytes of `tensor`, or a host buffer of as many, which is added to `lent`."""
        if not self._must_stage(tensor):
            return as_bytes(tensor)
        lent.append(self._buffers.take(tensor.numel() * tensor.element_size()))
        return lent[-1]


def _staged(messages: Sequence[Message], carried: Sequence[Message]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors that a buffer stands for, each with it."""
    pairs = zip(messages, carried, strict=True)
    return [(m.tensor, c.tensor) for m, c in pairs if m.tensor.data_ptr() != c.tensor.data_ptr()]
