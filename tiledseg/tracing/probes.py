"""Comparison of a traced graph with its module on drawn images, in float64: outputs, and gradients in both modes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tiledseg.errors import ConfigError
from tiledseg.models.network import GraphNetwork
from tiledseg.tracing.state import in_mode, kept_state

LARGE = 1000.0  # pixels are 0 to 10,000
OUTPUTS = {torch.float64: 1e-11, torch.float32: 2e-5}
GRADIENTS = {torch.float64: 1e-9, torch.float32: 1e-3}
COARSE = 2e-2  # of other dtypes


def check_against(
    network: GraphNetwork, module: nn.Module, probes: Sequence[torch.Tensor], wanted: Sequence[int] | None, still: bool
) -> None:
    """Raise ConfigError where the graph does not give what the module gives for these images, small and large.

    Where gradients of the two differ, a module in training is refused; the network of one in evaluation refuses to
    give gradients (`GraphNetwork.own_gradients`).
    """
    network, module, probes, given = *_in_double(network, module, probes, wanted), network
    with torch.no_grad(), _mode(network, module, False):
        for x_BCHW in (*probes, LARGE * probes[-1]):
            _check_outputs(network, module, x_BCHW, wanted)
    if given.own_gradients:
        return
    for training in (False, True):
        if training and (still or given.untrained or not module.training or _draws(module, probes[0])):
            return
        with _mode(network, module, training):
            try:
                name = _other_gradient(network, module, probes[0], wanted)
                reason = f"the gradient of '{name}' is another than the graph's" if name else None
            except RuntimeError as error:  # such as a function without a derivative
                reason = f"it has no gradients: {' '.join(str(error).split())[:200]}"
        if reason and module.training:
            raise ConfigError(f"the module cannot be trained on tiles: {reason}; map with module.eval()")
        if reason:
            given.own_gradients = given.untrained = reason
            return


def holds_anywhere(
    network: GraphNetwork, module: nn.Module, x_BCHW: torch.Tensor, wanted: Sequence[int] | None
) -> bool:
    """Return True if the graph gives what the module gives, or the module gives nothing, for an image of any size."""
    with torch.no_grad(), _mode(network, module, False):
        try:
            expected = module(x_BCHW.clone())
        except Exception:  # whatever the module raises
            return True
        try:
            return _worst(network(x_BCHW), expected, wanted) <= OUTPUTS.get(x_BCHW.dtype, COARSE)
        except Exception:  # sizes that do not join
            return False


def _in_double(
    network: GraphNetwork, module: nn.Module, probes: Sequence[torch.Tensor], wanted: Sequence[int] | None
) -> tuple[GraphNetwork, nn.Module, list[torch.Tensor]]:
    """Return copies in float64; network and module as they are where the module does not run in it."""
    try:
        network_64, module_64 = copy.deepcopy((network, module))
        doubled = [x_BCHW.double() for x_BCHW in probes]
        network_64.double(), module_64.double()
        with torch.no_grad(), _mode(network_64, module_64, False):
            made = tensors_of(module_64(doubled[-1].clone()))
        if all(tensor.dtype == torch.float64 for tensor in made):
            return network_64, module_64, doubled
    except Exception:  # whatever the module raises, or cannot be copied
        pass
    return network, module, list(probes)


def _check_outputs(
    network: GraphNetwork, module: nn.Module, x_BCHW: torch.Tensor, wanted: Sequence[int] | None
) -> None:
    expected = module(x_BCHW.clone())
    try:
        found = network(x_BCHW)
    except Exception as error:  # a function that takes other things than it was thought to
        raise ConfigError(
            f"the module's graph does not run: {type(error).__name__}: {' '.join(str(error).split())[:200]}; write "
            "that function in other words, and please report it"
        ) from error
    worst = _worst(found, expected, wanted)
    if not worst <= OUTPUTS.get(x_BCHW.dtype, COARSE):
        raise ConfigError(
            f"the module's graph gives outputs that differ from the module's by {worst:.1e} for {tuple(x_BCHW.shape)}: "
            "it pads, crops or resizes by the size, or does something that was not seen; write it in other words"
        )


def _worst(found: Any, expected: Any, wanted: Sequence[int] | None) -> float:
    """Return the largest difference of an output, relative to its norm; infinite for another shape."""
    pairs = list(zip(tensors_of(found), chosen(tensors_of(expected), wanted), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    return max(((a - b).nan_to_num().norm() / b.nan_to_num().norm().clamp_min(1e-30)).item() for a, b in pairs)


def _other_gradient(
    network: GraphNetwork, module: nn.Module, x_BCHW: torch.Tensor, wanted: Sequence[int] | None
) -> str | None:
    """Return the name of a weight whose gradient is another than the module's; None where there is none."""
    found = [_gradients(each, x_BCHW, None if each is network else wanted) for each in (network, module)]
    total = max((gradient.norm().item() for gradient in found[1].values()), default=0.0)
    for name, expected in found[1].items():
        given = found[0].get(name, torch.zeros_like(expected))
        scale = max(expected.norm().item(), 1e-6 * total)
        if not (given - expected).norm().item() <= GRADIENTS.get(x_BCHW.dtype, COARSE) * scale:
            return name
    return next((name for name in found[0] if name not in found[1] and found[0][name].norm() > 1e-9 * total), None)


def _gradients(each: nn.Module, x_BCHW: torch.Tensor, wanted: Sequence[int] | None) -> dict[str, torch.Tensor]:
    given_BCHW = x_BCHW.clone().requires_grad_()
    named: dict[str, torch.Tensor] = {n: weight for n, weight in each.named_parameters() if weight.requires_grad}
    named["its input"] = given_BCHW
    draw, before = torch.Generator().manual_seed(1), {name: weight.grad for name, weight in named.items()}
    for weight in named.values():
        weight.grad = None
    with torch.enable_grad():
        made = chosen(tensors_of(each(given_BCHW * 1)), wanted)
        total = sum(((y * torch.randn(y.shape, generator=draw).to(y)).sum() for y in made), torch.zeros(()).to(made[0]))
        if total.requires_grad:
            total.backward()
    found = {name: weight.grad for name, weight in named.items() if weight.grad is not None}
    for name, weight in named.items():
        weight.grad = before[name]
    return found


def _draws(module: nn.Module, x_BCHW: torch.Tensor) -> bool:
    """Return True if the module draws random numbers in training."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), kept_state(module), in_mode(module, True):
        before = torch.random.get_rng_state()
        module(x_BCHW.clone())
        return not torch.equal(before, torch.random.get_rng_state())


@contextmanager
def _mode(network: GraphNetwork, module: nn.Module, training: bool) -> Iterator[None]:
    """Set both to a mode, and all modes and buffers back."""
    with kept_state(network), kept_state(module), in_mode(module, training), in_mode(network, training):
        yield


def chosen(values: Sequence[Any], wanted: Sequence[int] | None) -> list[Any]:
    """Return the outputs that were asked for."""
    return [values[index] for index in (range(len(values)) if wanted is None else wanted)]


def tensors_of(value: object) -> list[torch.Tensor]:
    """Return the tensors of a module's output: in a list, tuple or dict of any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return tensors_of(list(value.values()))
    return [tensor for each in value for tensor in tensors_of(each)] if isinstance(value, list | tuple) else []
