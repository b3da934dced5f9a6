"""Loading of a checkpoint into a network and its optimizer: bit for bit, on every rank, read by one.

Rank 0 opens a file and broadcasts it tensor by tensor, in the order of its names. A rank puts each tensor where it
belongs, or drops it, before the next comes, so it holds one more than it keeps. Bytes read do not grow with the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from tiledseg.checkpoint.check import AVERAGE, MODEL, OPTIMIZER, Checkpoint
from tiledseg.checkpoint.folder import numbers_of
from tiledseg.checkpoint.saved_state import SavedState
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import CheckpointError


class _Head(NamedTuple):
    """A tensor before it comes."""

    shape: torch.Size
    dtype: torch.dtype


class _File:
    """A file's tensors on every rank of a mesh (None: one rank alone), read by the root.

    Building one and going through it are collective, and each must be gone through to its end. Nothing can deadlock:
    the names are the root's, so all ranks call the same broadcasts in the same order, and nobody leaves on its own
    (`agree`). A file that the root cannot read is raised on all of them before the first broadcast.
    """

    def __init__(self, path: Path, mesh: Mesh | None) -> None:
        self._path, self._mesh = path, mesh
        self._held: dict[str, torch.Tensor] = {}  # on the root: mapped, and read as each is sent
        self.heads: dict[str, _Head] = mesh.on_root(self._open) if mesh is not None else self._open()

    def agree(self, check: Callable[[], None]) -> None:
        """Raise on every rank the refusal of `check` on any."""
        if self._mesh is None:
            check()
        else:
            self._mesh.on_all(check)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor with its name, on the CPU."""
        for name, head in self.heads.items():
            tensor = self._held.pop(name) if name in self._held else torch.empty(head.shape, dtype=head.dtype)
            if self._mesh is not None:
                self._mesh.communicator.broadcast(tensor)
            yield name, tensor

    def _open(self) -> dict[str, _Head]:
        try:
            self._held = load_file(self._path)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{self._path} was whole and cannot be read any more ({reason}); let nobody change it, and run again"
            ) from error
        return {name: _Head(tensor.shape, tensor.dtype) for name, tensor in self._held.items()}


def load_average(checkpoint: Checkpoint, mesh: Mesh | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the average of the weights by name, tensor by tensor; nothing if the run takes none. Collective: go through
    it to its end."""
    if checkpoint.averages:
        yield from _File(checkpoint.path / AVERAGE, mesh)


def load_network(checkpoint: Checkpoint, network: nn.Module, average: bool = False, mesh: Mesh | None = None) -> None:
    """Fill `network` with the checkpoint's weights, or their `average` where it has one, bit for bit. Collective over
    `mesh`, whose root reads; None: this rank alone.

    Raises CheckpointError where they do not fit.
    """
    file = _File(checkpoint.path / (AVERAGE if average and checkpoint.averages else MODEL), mesh)
    own = network.state_dict()
    file.agree(lambda: _check_network(checkpoint, file.heads, own))
    with torch.no_grad():
        for name, tensor in file:
            own[name].copy_(tensor)


def _check_network(checkpoint: Checkpoint, saved: dict[str, _Head], own: dict[str, torch.Tensor]) -> None:
    wrong = sorted(saved.keys() ^ own.keys()) or sorted(k for k in own if own[k].shape != saved[k].shape)
    if wrong:
        here = tuple(own[wrong[0]].shape) if wrong[0] in own else "absent"
        there = tuple(saved[wrong[0]].shape) if wrong[0] in saved else "absent"
        raise CheckpointError(
            f"{checkpoint.path} is of another model: '{wrong[0]}' is {there} there and {here} in this network; "
            "use the configuration it was trained with"
        )


def load_optimizer(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, mesh: Mesh | None = None) -> None:
    """Fill `optimizer` with the checkpoint's state; raises CheckpointError where it is of another optimizer. Collective
    over `mesh`, whose root reads; None: this rank alone.

    Hyperparameters are this run's: only what the optimizer has gathered comes from the checkpoint. The state of
    parameters on the meta device, which another stage holds, is left out; so is that of frozen ones, and a momentum
    that this run has none of. Parameters that were frozen have none there, and start anew.
    """
    file = _File(checkpoint.path / OPTIMIZER, mesh)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    file.agree(lambda: _check_optimizer(checkpoint, optimizer, file.heads, parameters))
    state: dict[int, dict[str, torch.Tensor]] = {}
    places = {number: place for place, number in enumerate(numbers_of(optimizer))}
    for key, tensor in file:
        number, _, name = key.partition(".")
        index = places[int(number)]
        unused = name == "momentum_buffer" and not optimizer.param_groups[0]["momentum"]
        if parameters[index].requires_grad and not unused:
            state.setdefault(index, {})[name] = _laid_out(tensor, parameters[index])
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _check_optimizer(
    checkpoint: Checkpoint,
    optimizer: torch.optim.Optimizer,
    heads: dict[str, _Head],
    parameters: list[nn.Parameter],
) -> None:
    there_is = {int(key.partition(".")[0]) for key in heads}
    counts = len(there_is), len(parameters)
    names = checkpoint.saved.config.optimizer.name, type(optimizer).__name__.lower()
    may_lack = not heads or any(0 in factors.values() for factors in factors_of(checkpoint.saved))
    trained = {number for number, p in zip(numbers_of(optimizer), parameters, strict=True) if p.requires_grad}
    if names[0] != names[1] or counts[0] > counts[1] or (trained - there_is and not may_lack):
        there, here = (f"{name} of {count} parameters" for name, count in zip(names, counts, strict=True))
        raise CheckpointError(
            f"{checkpoint.path} holds the state of another optimizer: {there} there, {here} here; use the same "
            "optimizer.name"
        )


def factors_of(saved: SavedState) -> list[dict[str, float]]:
    """Return the factors of the learning rate of the run as it was begun, and since."""
    changes = (resumed.changed.get("optimizer.lr_factors") for resumed in saved.resumed)
    return [saved.config.optimizer.lr_factors, *(change["from"] for change in changes if change)]


def _laid_out(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with the strides of its parameter, if it has its shape: the fused update wants them alike."""
    if tensor.shape != parameter.shape:
        return tensor.clone()  # a count of steps: a view would hold the whole file
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
