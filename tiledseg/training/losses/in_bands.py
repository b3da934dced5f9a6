"""The sum of losses of single pixels on a CPU, some rows at a time: they are computed, summed and differentiated while
their logits are in a core's cache, by all cores.

Over a whole tile each step of it is a pass over memory, and torch's likelihood takes one core for one image. What is
kept until the backward pass is the gradient alone, fewer bytes than what it would be computed from: fewer than planned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tiledseg.models.layers.on_cpu.beside import can_share, side_by_side
from tiledseg.models.layers.on_cpu.followed import is_followed
from tiledseg.models.rerun.homes import hooks_around

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of logits_BKHW and target_BHW: a float64 scalar
_PIXELS = 1 << 16  # of a band, about


def summed(loss: Loss, logits_BKHW: torch.Tensor, target_BHW: torch.Tensor) -> torch.Tensor:
    """`loss` of all pixels, which is a sum over them, of each by its own logits and class. Bands follow from the shape
    alone, so that the sum is the same on any number of threads."""
    small, elsewhere = target_BHW.numel() <= 2 * _PIXELS, logits_BKHW.device.type != "cpu"
    if small or elsewhere or is_followed() or hooks_around() is not None:
        return loss(logits_BKHW, target_BHW)
    wanted = torch.is_grad_enabled() and logits_BKHW.requires_grad
    made: torch.Tensor = _Summed.apply(logits_BKHW, target_BHW, loss, wanted)
    return made


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_BKHW: torch.Tensor, target_BHW: torch.Tensor, loss: Loss, wanted: bool
    ) -> torch.Tensor:
        slopes_BKHW = torch.empty_like(logits_BKHW) if wanted else None
        ctx.save_for_backward(slopes_BKHW)

        def of(band: slice) -> torch.Tensor:
            own_BKHW = logits_BKHW[:, :, band].detach().requires_grad_(wanted)
            with torch.set_grad_enabled(wanted):
                made = loss(own_BKHW, target_BHW[:, band])
            if slopes_BKHW is not None:
                slopes_BKHW[:, :, band] = torch.autograd.grad(made, own_BKHW)[0]
            return made.detach()

        height, rows = target_BHW.shape[1], max(1, _PIXELS // target_BHW[:, 0].numel())
        pieces = [partial(of, slice(begin, begin + rows)) for begin in range(0, height, rows)]
        return torch.stack(side_by_side(pieces) if can_share() else [piece() for piece in pieces]).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes_BKHW,) = ctx.saved_tensors
        return slopes_BKHW if g == 1 else slopes_BKHW * g.to(slopes_BKHW.dtype), None, None, None
