"""The halo exchange as an operation of autograd: from each rank's own block to the window that it needs, and back.

All that a window lacks comes straight from its owners, corners from the rank across them: one batch of messages for
both dims. The backward pass is the adjoint: each piece of a window's gradient goes back to the rank that owns the piece
and is added there, in the order of ranks, so sums are the same run after run.

Copies are saved where they can be. An activation is applied while its window is made, and its gradient while the
window's is taken apart (`activated`). To the gradient of a window that nobody else has, what arrives is added where it
lies, and the block's is a view of it (`owned`).

What is sent and where it goes is worked out once for each layout of a block (`exchange_parts`): an exchange then makes
a tensor, copies and posts.

Deadlock cannot arise: all ranks of an image run the same exchanges in the same order (it is the order of the layers,
and autograd's order is its reverse on every rank); within one exchange every receive and send is posted before anything
is waited for; who sends what to whom follows from integers that all ranks share.

Where a window is to be made once more (`models.rerun.rebuild`), what has arrived is kept, and put beside the rank's own
block again: nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tiledseg.comm.axes import Axes
from tiledseg.comm.transports.point_to_point import Message
from tiledseg.comm.transports.work import DoneWork, Work
from tiledseg.geometry.sharing.block_exchange import BlockExchange
from tiledseg.models.rerun.notes import Notes, current
from tiledseg.spatial.exchange_parts import Part, Take, Way
from tiledseg.spatial.written import Written


class Flight(NamedTuple):
    """An exchange whose messages are under way into parts of what is `made`; `notes`: where what arrives is kept;
    `form`: what is applied to it."""

    work: Work
    made_BCHW: torch.Tensor
    arriving: tuple[tuple[int, Part], ...] = ()
    notes: Notes | None = None
    form: Written | None = None

    def window(self) -> torch.Tensor:
        """What was wanted, once all of it has arrived."""
        self.work.wait()
        for _, part in self.arriving:
            at_BCHW, strip_BCHW = part.of(self.made_BCHW), part.strip_BCHW
            if self.form is not None:
                self.form.apply(at_BCHW if strip_BCHW is None else strip_BCHW, out=at_BCHW)
            elif strip_BCHW is not None:
                at_BCHW.copy_(strip_BCHW)
        if self.notes is not None:
            self.notes.add([part.of(self.made_BCHW).clone() for _, part in self.arriving])
        return self.made_BCHW

    def gradient(self) -> torch.Tensor:
        """The sum of what belongs to this rank's block, once all of it has arrived."""
        self.work.wait()
        for _, part in self.arriving:
            assert part.strip_BCHW is not None, "what is added to others has a strip"
            part.of(self.made_BCHW).add_(part.strip_BCHW)
        return self.made_BCHW


@dataclass
class HaloExchanger:
    """Carries the halos of one place in a network. Its strips are allocated once and used again at every step."""

    axes: Axes
    _ways: dict[tuple[Any, ...], Way] = field(default_factory=dict)

    @property
    def strips(self) -> list[torch.Tensor]:
        """What is kept between steps."""
        parts = (part for way in self._ways.values() for _, part in (*way.sends, *way.receives))
        return [part.strip_BCHW for part in parts if part.strip_BCHW is not None]

    def exchange(
        self, x_BCHW: torch.Tensor, exchange: BlockExchange | None, fill: float = 0.0, owned: bool = False
    ) -> torch.Tensor:
        """The window of this rank from the blocks of all. Collective over the ranks of the image.

        `x_BCHW` is this rank's own block along each dim that has an exchange. Beyond the tensor's ends the window holds
        `fill`. Where nothing is to be done (None) x itself is returned. Differentiable: the adjoint adds each part of
        the gradient to its owner, and drops what was filled in. `owned`: who reads the window makes its gradient, and
        nobody else has that.
        """
        if exchange is None:
            return x_BCHW
        result: torch.Tensor = _Exchange.apply(x_BCHW, self, exchange, fill, owned)
        return result

    def activated(self, x_BCHW: torch.Tensor, exchange: BlockExchange, form: Written) -> torch.Tensor:
        """What an activation that is zero at zero makes of the window, in one pass; x is left as it is. Collective as
        `exchange`. Autograd keeps the result, as of an activation that writes over its input."""
        result: torch.Tensor = _Activated.apply(x_BCHW, self, exchange, form)
        return result

    def start(self, x_BCHW: torch.Tensor, exchange: BlockExchange, fill: float, form: Written | None = None) -> Flight:
        """Posts the messages, and makes what needs none of them; leave x alone until its `window` is there. Without
        autograd. What has been noted is taken as it was, and nothing is posted."""
        way, notes = self._way(Way.forward, x_BCHW, exchange), current()

        copy = _copy_of(x_BCHW)
        take = copy if form is None else lambda part, into_BCHW: form.apply(part.of(x_BCHW), out=into_BCHW)
        window_BCHW = way.empty(x_BCHW)
        if notes is None or not notes.is_read:
            work = self._post(way, x_BCHW, window_BCHW, copy)
            way.place(take, fill, window_BCHW)
            return Flight(work, window_BCHW, way.receives, notes, form)
        way.place(take, fill, window_BCHW)
        for (_, part), arrived_BCHW in zip(way.receives, notes.next(), strict=True):
            part.of(window_BCHW).copy_(arrived_BCHW)
        return Flight(DoneWork(), window_BCHW)

    def start_back(self, gradient_BCHW: torch.Tensor, exchange: BlockExchange, owned: bool = False) -> Flight:
        """The adjoint: from the gradient of this rank's window to the `gradient` of its own block. `owned`: it is a
        part of the former where that holds all of the block."""
        copy = _copy_of(gradient_BCHW)
        if owned and exchange.kept is not None and exchange.keeps_all:
            way = self._way(Way.back_in_place, gradient_BCHW, exchange)
            own_BCHW = way.own.of(gradient_BCHW)
            return Flight(self._post(way, gradient_BCHW, own_BCHW, copy), own_BCHW, way.receives)
        return self._start_back(self._way(Way.back, gradient_BCHW, exchange), gradient_BCHW, copy)

    def start_back_activated(
        self, gradient_BCHW: torch.Tensor, y_BCHW: torch.Tensor, exchange: BlockExchange, form: Written
    ) -> Flight:
        """That of `activated`, whose result `y_BCHW` was."""

        def take(part: Part, into_BCHW: torch.Tensor) -> None:
            form.gradient(part.of(gradient_BCHW), part.beside(y_BCHW), grad_input=into_BCHW)

        return self._start_back(self._way(Way.back_apart, gradient_BCHW, exchange), gradient_BCHW, take)

    def _start_back(self, way: Way, gradient_BCHW: torch.Tensor, take: Take) -> Flight:
        made_BCHW = way.empty(gradient_BCHW)
        work = self._post(way, gradient_BCHW, made_BCHW, take)
        way.place(take, 0.0, made_BCHW)
        return Flight(work, made_BCHW, way.receives)

    def _post(self, way: Way, x_BCHW: torch.Tensor, made_BCHW: torch.Tensor, take: Take) -> Work:
        for _, part in way.sends:
            if part.strip_BCHW is not None:
                take(part, part.strip_BCHW)
        outgoing = [Message(rank, part.carried(x_BCHW)) for rank, part in way.sends]
        incoming = [Message(rank, part.carried(made_BCHW)) for rank, part in way.receives]
        return self.axes.point_to_point.start(outgoing, incoming)

    def _way(self, make: Callable[..., Way], x_BCHW: torch.Tensor, exchange: BlockExchange) -> Way:
        key = make, exchange, x_BCHW.shape, x_BCHW.stride(), x_BCHW.dtype, x_BCHW.device
        if key not in self._ways:
            self._ways[key] = make(x_BCHW, exchange, self.axes.rank_at)
        return self._ways[key]


def _copy_of(x_BCHW: torch.Tensor) -> Take:
    return lambda part, into_BCHW: into_BCHW.copy_(part.of(x_BCHW))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BCHW: torch.Tensor, exchanger: HaloExchanger, exchange: BlockExchange, fill: float, owned: bool
    ) -> torch.Tensor:
        ctx.exchanger, ctx.exchange, ctx.owned = exchanger, exchange, owned
        return exchanger.start(x_BCHW, exchange, fill).window()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_BCHW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flight = ctx.exchanger.start_back(gradient_BCHW, ctx.exchange, ctx.owned)
        return flight.gradient(), None, None, None, None


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BCHW: torch.Tensor, exchanger: HaloExchanger, exchange: BlockExchange, form: Written
    ) -> torch.Tensor:
        ctx.exchanger, ctx.exchange, ctx.form = exchanger, exchange, form
        y_BCHW = exchanger.start(x_BCHW, exchange, 0.0, form).window()
        ctx.save_for_backward(y_BCHW)
        return y_BCHW

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_BCHW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (y_BCHW,) = ctx.saved_tensors
        flight = ctx.exchanger.start_back_activated(gradient_BCHW, y_BCHW, ctx.exchange, ctx.form)
        return flight.gradient(), None, None, None
