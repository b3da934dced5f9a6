"""Whether a checkpoint's tensors are those of the network and the optimizer that its own manifest names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from tiledseg.architecture.foreign import UntracedError
from tiledseg.architecture.network import Network
from tiledseg.checkpoint.saved_state import SavedState
from tiledseg.checkpoint.typed_json import MalformedError, quoted
from tiledseg.models.frozen import factor_of
from tiledseg.models.network import GraphNetwork, build_modules

Tensors = Mapping[str, torch.Tensor]

_ENTRIES = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}
_NEVER_NEGATIVE = ("running_var", "num_batches_tracked", "exp_avg_sq", "step")


def check_tensors(saved: SavedState, groups: Sequence[Mapping[str, Any]], weights: Tensors, optimizer: Tensors) -> None:
    """Raise MalformedError for a tensor too many, too few, of a wrong shape or dtype, or with an impossible value.

    `weights` by name, `optimizer` by `index.entry`, as `Contents` has them; `groups` are the optimizer's.
    """
    try:
        network = _without_values(saved.network)
    except UntracedError:
        return _check_values(weights, optimizer)  # names and shapes: where the author's code has run, and it is filled
    own = network.state_dict()
    different = sorted(own.keys() ^ weights.keys())
    if different:
        raise MalformedError(f"'{different[0][:60]}' is in the {'network' if different[0] in own else 'file'} alone")
    wide = {tensor.dtype for name, tensor in weights.items() if own[name].is_floating_point()}
    if len(wide) != 1 or not wide <= {torch.float32, torch.float64}:
        raise MalformedError(f"its weights are {', '.join(sorted(map(str, wide)))}, not all float32 or all float64")
    for name, tensor in weights.items():
        dtype = wide.copy().pop() if own[name].is_floating_point() else own[name].dtype
        _check(f"'{name}'", tensor, own[name].shape, dtype)
    shapes = [parameter.shape for parameter in network.parameters()]
    _check_groups(groups, len(shapes))
    names = [name for name, _ in network.parameters_by_node()]
    frozen = {i for i, name in enumerate(names) for factors in factors_of(saved) if factor_of(name, factors) == 0}
    _check_optimizer(saved.config.optimizer.name, optimizer, shapes, wide.pop(), frozen)


def check_average(average: Tensors, weights: Tensors) -> None:
    """Raise MalformedError unless the average has the names, shapes and dtypes of the weights."""
    different = sorted(average.keys() ^ weights.keys())
    if different:
        raise MalformedError(
            f"'{different[0][:60]}' is in the {'average' if different[0] in average else 'weights'} alone"
        )
    for name, tensor in average.items():
        _check(f"the average of '{name}'", tensor, weights[name].shape, weights[name].dtype)


def factors_of(saved: SavedState) -> list[Mapping[str, float]]:
    """The factors of the learning rate of the run as it was begun, and since."""
    changes = (resumed.changed.get("optimizer.lr_factors") for resumed in saved.resumed)
    before = (change.get("from") for change in changes if isinstance(change, dict))
    return [saved.config.optimizer.lr_factors, *(factors for factors in before if isinstance(factors, dict))]


def _check_values(weights: Tensors, optimizer: Tensors) -> None:
    for name, tensor in (*weights.items(), *optimizer.items()):
        _check(f"'{name}'", tensor, tensor.shape, tensor.dtype)


def _without_values(network: Network) -> GraphNetwork:
    try:
        with torch.device("meta"):
            return build_modules(network)
    except UntracedError:
        raise
    except (RuntimeError, OverflowError, TypeError, ValueError):
        raise MalformedError(f"state.network is {quoted(network)}, which cannot be built") from None


def _check(name: str, tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.shape != shape:
        raise MalformedError(f"{name} is {tuple(tensor.shape)}, not {tuple(shape)}")
    if tensor.dtype != dtype:
        raise MalformedError(f"{name} is {tensor.dtype}, not {dtype}")
    if not bool(tensor.isfinite().all()):
        raise MalformedError(f"{name} holds a value that is not finite")
    if name.strip("'").endswith(_NEVER_NEGATIVE) and bool((tensor < 0).any()):
        raise MalformedError(f"{name} holds a value below 0")


def _check_groups(groups: Sequence[Mapping[str, Any]], count: int) -> None:
    held = [index for group in groups for index in group["params"]]
    if held != list(range(count)):
        raise MalformedError(f"optimizer_groups has the parameters {quoted(held)}, the network {count}")


def _check_optimizer(
    name: str, found: Tensors, shapes: Sequence[torch.Size], dtype: torch.dtype, frozen: AbstractSet[int]
) -> None:
    """All parameters have their entries, or none has (no step had a valid pixel); one that is or was frozen may have
    none."""
    if name not in _ENTRIES:
        raise MalformedError(f"state.config.optimizer.name is {quoted(name)}, not one of {', '.join(sorted(_ENTRIES))}")
    lacking = frozen - {int(key.partition(".")[0]) for key in found if key.partition(".")[0].isdecimal()}
    expected = {f"{index}.{entry}" for index in range(len(shapes)) if index not in lacking for entry in _ENTRIES[name]}
    different = sorted(found.keys() ^ expected)
    if found and different:
        fault = "is missing" if different[0] in expected else f"is no entry of {name} for {len(shapes)} parameters"
        raise MalformedError(f"'{different[0][:60]}' of the optimizer {fault}")
    for key, tensor in found.items():
        index, _, entry = key.partition(".")
        counts = entry == "step"  # torch counts steps in its default dtype
        shape = torch.Size() if counts else shapes[int(index)]
        _check(f"'{key}'", tensor, shape, tensor.dtype if counts and tensor.is_floating_point() else dtype)
