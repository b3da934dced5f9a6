"""Activations that torch differentiates by their output, as functions that write into a tensor that is there: a window
is made as their output, in one pass over memory. The bits are those of the modules, but for the last one of
exponentials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

aten: Any = torch.ops.aten
SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946  # alpha and scale, as torch has them


class Written(NamedTuple):
    """Without autograd: `apply(x_BCHW, out=y_BCHW)`, and `gradient(g_BCHW, y_BCHW, grad_input=dx_BCHW)` of x from that
    of y."""

    apply: Callable[..., Any]
    gradient: Callable[..., Any]


def is_watched(module: nn.Module) -> bool:
    """Return True if hooks see what goes through the module, or through all modules."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or bool(_has_any_global_hook())


def written(module: nn.Module) -> Written | None:
    """Of a module that writes over its input; None of any other."""
    form = _FORMS.get(type(module))
    return form(module) if form is not None and getattr(module, "inplace", False) else None


def _leaky(slope: float) -> Written:
    return Written(_after(aten.leaky_relu.out, slope), _after(aten.leaky_relu_backward.grad_input, slope, True))


def _cut(low: float, high: float) -> Written:
    return Written(_after(aten.hardtanh.out, low, high), _after(aten.hardtanh_backward.grad_input, low, high))


def _elu(alpha: float, scale: float, input_scale: float, back_scale: float) -> Written:
    """`back_scale`: `input_scale` as the gradient has it."""

    def gradient(g_BCHW: torch.Tensor, y_BCHW: torch.Tensor, grad_input: torch.Tensor) -> None:
        aten.elu_backward.grad_input(g_BCHW, alpha, scale, back_scale, True, y_BCHW, grad_input=grad_input)

    return Written(_after(aten.elu.out, alpha, scale, input_scale), gradient)


def _celu(alpha: float) -> Written:
    """Whose gradient torch divides by alpha in float32, of any tensor."""
    return _elu(alpha, 1.0, 1.0 / alpha, 1.0 / torch.tensor(alpha, dtype=torch.float32).item())


def _after(function: Any, *numbers: float) -> Callable[..., Any]:
    """With these numbers after its tensors."""
    return lambda *tensors, **keywords: function(*tensors, *numbers, **keywords)


_FORMS: dict[type[nn.Module], Callable[[Any], Written]] = {
    nn.ReLU: lambda module: Written(_after(aten.clamp_min.out, 0), _after(aten.threshold_backward.grad_input, 0)),
    nn.ReLU6: lambda module: _cut(0.0, 6.0),
    nn.LeakyReLU: lambda module: _leaky(module.negative_slope),
    nn.ELU: lambda module: _elu(module.alpha, 1.0, 1.0, 1.0),
    nn.SELU: lambda module: _elu(*SELU, 1.0, 1.0),
    nn.CELU: lambda module: _celu(module.alpha),
}
