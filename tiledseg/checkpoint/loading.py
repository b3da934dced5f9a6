"""Loading of a checkpoint into a network and its optimizer: bit for bit, on every rank, read by one.

Rank 0 opens a file and broadcasts it tensor by tensor, in the order of its names. A rank puts each tensor where it
belongs, or drops it, before the next comes, so it holds one more than it keeps. Bytes read do not grow with the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from tiledseg.checkpoint.check import AVERAGE, MODEL, OPTIMIZER, Checkpoint
from tiledseg.checkpoint.folder import numbers_of
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import CheckpointError

_Heads = Mapping[str, tuple[torch.Size, torch.dtype]]  # of tensors before they come, by name


def _tensors(path: Path, mesh: Mesh | None, check: Callable[[_Heads], None]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a file with its name, on the CPU of every rank of a mesh (None: one rank alone), read by the
    root. A refusal of `check` on any rank is raised on all.

    Collective; go through it to its end. Nothing can deadlock: the names are the root's, so all ranks call the same
    broadcasts in the same order, and nobody leaves on its own. A file that the root cannot read is raised on all of
    them before the first broadcast.
    """
    held: dict[str, torch.Tensor] = {}  # on the root: mapped, and read as each is sent

    def open_file() -> _Heads:
        try:
            held.update(load_file(path))
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{path} was whole and cannot be read any more ({reason}); let nobody change it, and run again"
            ) from error
        return {name: (tensor.shape, tensor.dtype) for name, tensor in held.items()}

    heads: _Heads = open_file() if mesh is None else mesh.on_root(open_file)
    if mesh is None:
        check(heads)
    else:
        mesh.on_all(lambda: check(heads))
    for name, (shape, dtype) in heads.items():
        tensor = held.pop(name) if name in held else torch.empty(shape, dtype=dtype)
        if mesh is not None:
            mesh.communicator.broadcast(tensor)
        yield name, tensor


def load_average(checkpoint: Checkpoint, mesh: Mesh | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the average of the weights by name, tensor by tensor; nothing if the run takes none. Collective: go through
    it to its end."""
    if checkpoint.averages:
        yield from _tensors(checkpoint.path / AVERAGE, mesh, lambda heads: None)


def load_network(checkpoint: Checkpoint, network: nn.Module, average: bool = False, mesh: Mesh | None = None) -> None:
    """Fill `network` with the checkpoint's weights, or their `average` where it has one, bit for bit. Collective over
    `mesh`, whose root reads; None: this rank alone.

    Raises CheckpointError where they do not fit.
    """
    own = network.state_dict()

    def check(saved: _Heads) -> None:
        wrong = sorted(saved.keys() ^ own.keys()) or sorted(k for k in own if own[k].shape != saved[k][0])
        if wrong:
            here = tuple(own[wrong[0]].shape) if wrong[0] in own else "absent"
            there = tuple(saved[wrong[0]][0]) if wrong[0] in saved else "absent"
            raise CheckpointError(
                f"{checkpoint.path} is of another model: '{wrong[0]}' is {there} there and {here} in this network; "
                "use the configuration it was trained with"
            )

    file = checkpoint.path / (AVERAGE if average and checkpoint.averages else MODEL)
    with torch.no_grad():
        for name, tensor in _tensors(file, mesh, check):
            own[name].copy_(tensor)


def load_optimizer(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, mesh: Mesh | None = None) -> None:
    """Fill `optimizer` with the checkpoint's state; raises CheckpointError where it is of another optimizer. Collective
    over `mesh`, whose root reads; None: this rank alone.

    Hyperparameters are this run's: only what the optimizer has gathered comes from the checkpoint. The state of
    parameters on the meta device, which another stage holds, is left out; so is that of frozen ones, and a momentum
    that this run has none of. Parameters that were frozen have none there, and start anew.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = numbers_of(optimizer)

    def check(saved: _Heads) -> None:
        there_is = {int(key.partition(".")[0]) for key in saved}
        names = checkpoint.saved.config.optimizer.name, type(optimizer).__name__.lower()
        changes = (resumed.changed.get("optimizer.lr_factors") for resumed in checkpoint.saved.resumed)
        since = [checkpoint.saved.config.optimizer.lr_factors, *(change["from"] for change in changes if change)]
        may_lack = not saved or any(0 in factors.values() for factors in since)
        trained = {number for number, p in zip(numbers, parameters, strict=True) if p.requires_grad}
        if names[0] != names[1] or len(there_is) > len(parameters) or (trained - there_is and not may_lack):
            counts = len(there_is), len(parameters)
            there, here = (f"{name} of {count} parameters" for name, count in zip(names, counts, strict=True))
            raise CheckpointError(
                f"{checkpoint.path} holds the state of another optimizer: {there} there, {here} here; use the same "
                "optimizer.name"
            )

    state: dict[int, dict[str, torch.Tensor]] = {}
    places = {number: place for place, number in enumerate(numbers)}
    for key, tensor in _tensors(checkpoint.path / OPTIMIZER, mesh, check):
        number, _, name = key.partition(".")
        index = places[int(number)]
        parameter = parameters[index]
        if not parameter.requires_grad or (name == "momentum_buffer" and not optimizer.param_groups[0]["momentum"]):
            continue
        if tensor.shape == parameter.shape:  # with its strides: the fused update wants them alike
            laid_out = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
        else:
            laid_out = tensor.clone()  # a count of steps: a view would hold the whole file
        state.setdefault(index, {})[name] = laid_out
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
