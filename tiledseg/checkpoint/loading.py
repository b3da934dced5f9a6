"""Loading of weights: from a checkpoint, bit for bit, on all ranks; and from pretrained files.

Rank 0 reads a checkpoint's file and broadcasts it tensor by tensor, in the order of names. A rank copies each tensor,
or drops it, before the next comes, so it holds at most one tensor more than it keeps. Bytes read do not grow with the
number of ranks.

Pretrained files are state dicts of torch or safetensors files. No code in them is run: torch's are read as weights
only. The first convolution of an encoder is fitted to the image's bands: bands of the file (3: red, green, blue) keep
their weights, further ones get the mean of the file's, and all are scaled by 3 / bands, so that a grey pixel gives the
same activation. With fewer bands than the file's, each gets the mean. With as many, weights are the file's to the bit.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from tiledseg.architecture.network import Pretrainable
from tiledseg.checkpoint.folder import AVERAGE, MODEL, OPTIMIZER, Checkpoint, numbers_of, sha256
from tiledseg.checkpoint.saved_state import Origin
from tiledseg.comm.mesh import ALONE, Mesh
from tiledseg.config.checks import shown
from tiledseg.errors import CheckpointError, first_line
from tiledseg.models.network import build_modules

_Heads = Mapping[str, tuple[torch.Size, torch.dtype]]  # shapes and dtypes of a file's tensors, by name


def _tensors(path: Path, mesh: Mesh, check: Callable[[_Heads], None]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of a file on the CPU of every rank of a mesh, read by the root. An error of `check` on any
    rank is raised on all.

    Collective; the caller must exhaust it. Nothing can deadlock: the names are the root's, so all ranks call the same
    broadcasts in the same order, and no rank stops alone. If the root cannot read the file, all ranks raise before the
    first broadcast.
    """
    held: dict[str, torch.Tensor] = {}  # on the root: memory-mapped, and read as each is sent

    def open_file() -> _Heads:
        try:
            held.update(load_file(path))
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{path} was whole and cannot be read any more ({reason}); let nobody change it, and run again"
            ) from error
        return {name: (tensor.shape, tensor.dtype) for name, tensor in held.items()}

    heads: _Heads = mesh.on_root(open_file)
    mesh.on_all(lambda: check(heads))
    for name, (shape, dtype) in heads.items():
        tensor = held.pop(name) if name in held else torch.empty(shape, dtype=dtype)
        mesh.communicator.broadcast(tensor)
        yield name, tensor


def load_average(checkpoint: Checkpoint, mesh: Mesh = ALONE) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the averaged weights by name, if there are any. Collective: the caller must exhaust it."""
    if checkpoint.averages:
        yield from _tensors(checkpoint.path / AVERAGE, mesh, lambda heads: None)


def load_network(checkpoint: Checkpoint, network: nn.Module, average: bool = False, mesh: Mesh = ALONE) -> None:
    """Copy the checkpoint's weights, or the averaged ones (`average`) if it has them, to `network`, bit for bit.
    Collective over `mesh`. Raises CheckpointError if they do not fit."""
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


def load_optimizer(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, mesh: Mesh = ALONE) -> None:
    """Copy the checkpoint's state to `optimizer`. Raises CheckpointError if it is another optimizer's. Collective over
    `mesh`.

    Hyperparameters stay this run's. State is left out for parameters of other stages (on the meta device), for frozen
    ones, and of a momentum that this run does not use. Parameters that were frozen before start without state.
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
        if names[0] != names[1] or not there_is <= set(numbers) or (trained - there_is and not may_lack):
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
        if tensor.shape == parameter.shape:  # with the parameter's strides, as the fused update needs
            laid_out = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
        else:
            laid_out = tensor.clone()  # a count of steps: a view would hold the whole file
        state.setdefault(index, {})[name] = laid_out
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


_WRAPPED = ("state_dict", "model_state_dict", "model")  # keys under which training scripts save a state dict
_CLASSIFIER = ("classifier.", "fc.")  # the published networks' last layers, which ours do not have
_COUNTER = "num_batches_tracked"  # missing in older files; no result depends on it
_PREFIX = re.compile(r"^(module|model|backbone|encoder)\.")  # prefixes of wrappers


def read_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name, on the CPU: the file's own, or those of a state dict inside it.

    Raises CheckpointError if there is no such file, or it holds no state dict.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            torchs = file.read(4)[:2] in (b"PK", b"\x80\x02")
        content: Any = torch.load(path, "cpu", weights_only=True) if torchs else load_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; give a file of weights") from None
    except (pickle.UnpicklingError, safetensors.SafetensorError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read as weights ({first_line(error)[:120]}); give a state dict of torch.save or "
            "a safetensors file"
        ) from None
    wrapped = [key for key in _WRAPPED if isinstance(content, Mapping) and isinstance(content.get(key), Mapping)]
    state = content[wrapped[0]] if wrapped else content
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(f"{path} holds '{type(state).__name__}', no tensors by name; give a state dict")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{path}: {shown(repr(name))} is '{type(tensor).__name__}', no tensor; give the state dict alone"
            )
    return dict(state)


def check_kind(path: str, name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raise CheckpointError for a tensor whose copy to `wanted` would change values: complex, integer or quantised for
    real numbers, or not dense (sparse, nested, on the meta device)."""
    dense = found.layout == torch.strided and not (found.is_nested or found.is_quantized or found.is_meta)
    kinds = {(each.is_floating_point(), each.is_complex(), each.dtype == torch.bool) for each in (found, wanted)}
    scaled = found.is_floating_point() and found.element_size() == 1  # float8, whose scales are separate
    too_large = found.dtype == torch.uint64 != wanted.dtype
    if not dense or len(kinds) > 1 or scaled or too_large:
        layout = "nested" if found.is_nested else "meta" if found.is_meta else found.layout
        raise CheckpointError(
            f"{path}: '{name}' is {found.dtype}, {layout}, of the network's {wanted.dtype}; give a dense tensor of that"
        )


def check_finite(path: str, name: str, weight: torch.Tensor) -> None:
    """Raise CheckpointError for a weight with a value that is not finite."""
    if not bool(weight.isfinite().all()):
        raise CheckpointError(f"{path}: '{name}' holds a value that is not finite; give another file")


def strip_prefixes(tensors: Mapping[str, torch.Tensor], wanted: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the tensors without the prefixes of wrappers (`module.`, `model.`, `backbone.`, `encoder.`) before
    `wanted` names. Other tensors only lose `module.`. Raises CheckpointError if two get one name."""
    stripped: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        short = name
        while short not in wanted and _PREFIX.match(short):
            short = _PREFIX.sub("", short)
        short = short if short in wanted else name.removeprefix("module.")
        if short in stripped:
            raise CheckpointError(f"two tensors of the file are '{short}' without their prefixes; give one of them")
        stripped[short] = tensor
    return stripped


def load_pretrained(path: str, network: Pretrainable) -> tuple[dict[str, torch.Tensor], Origin, str]:
    """Return a file's weights for a network's encoder, by our names and in the file's dtype; their origin; and a line
    for the user.

    Raises CheckpointError if the file holds none of them, one of another shape or not finite, or was trained with a
    norm that the network lacks.
    """
    try:
        origin = Origin(path, sha256(Path(path)))
    except OSError as error:
        raise CheckpointError(f"model.pretrained is {path}: {error.strerror}; give a file of weights") from None
    with torch.device("meta"):
        own = build_modules(network).state_dict()
    modules = {name for normed in (False, True) for name in network.file_names(normed).values()}
    leaves = ("weight", "bias", "running_mean", "running_var", _COUNTER)
    tensors = strip_prefixes(read_state_dict(path), {f"{name}.{leaf}" for name in modules for leaf in leaves})
    names = network.file_names(_norms(tensors) > 0)
    nodes = {node.replace(".", "-"): source for node, source in names.items()}
    split = {name: name.split(".") for name in own}  # layers, node, leaf
    sources = {name: f"{nodes[node]}.{leaf}" for name, (_, node, leaf) in split.items() if node in nodes}
    held = {name: source for name, source in sources.items() if source in tensors}
    unused = [name for name in tensors if name not in held.values() and not name.startswith(_CLASSIFIER)]
    if not held:
        raise CheckpointError(
            f"{path} holds none of the weights of {network.in_words.splitlines()[0]}; its first is "
            f"'{(unused or ['none'])[0]}'; give a file of this encoder"
        )
    if _norms(unused) and not _norms(held):
        raise CheckpointError(
            f"{path} was trained with batch norm, of which {_norms(unused)} fit nowhere; set model.norm to batch and "
            "model.encoder to the file's"
        )
    first, fitted = next(iter(sources)), dict[str, torch.Tensor]()
    for name, source in held.items():
        tensor, wanted = tensors[source], own[name]
        check_kind(path, source, tensor, wanted)
        widens = name == first and (tensor.shape[:1], tensor.shape[2:]) == (wanted.shape[:1], wanted.shape[2:])
        if tensor.shape != wanted.shape and not widens:
            raise CheckpointError(
                f"{path}: '{source}' is {tuple(tensor.shape)}, but the network's is {tuple(wanted.shape)}; give a file "
                "of this encoder, and leave model.base_channels out"
            )
        fitted[name] = widened(tensor, wanted.shape[1]) if widens else tensor
        check_finite(path, source, fitted[name])
    missing = [source for source in sources.values() if source not in tensors and not source.endswith(_COUNTER)]
    bare = len(network.file_names(True)) - len(names)
    words = (
        f"{len(held)} tensors of {path}",
        missing and f"it lacks {_some(missing)}",
        bare and f"it has no norms, of which {bare} begin at 1 and 0",
        unused and f"left out: {_some(unused)}",
    )
    return fitted, origin, f"the encoder begins with {'; '.join(str(part) for part in words if part)}"


def _norms(names: Iterable[str]) -> int:
    return sum(name.endswith(".running_mean") for name in names)


def widened(weight: torch.Tensor, bands: int) -> torch.Tensor:
    """Return a first convolution's weight (out, in, height, width) for another number of bands (see the module)."""
    mean, inputs = weight.mean(1, keepdim=True), weight.shape[1]
    if bands == inputs:
        return weight
    kept = weight if bands > inputs else weight[:, :0]
    return torch.cat([kept, *[mean] * (bands - kept.shape[1])], 1) * (inputs / bands)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"'{names[0]}'{more}"
