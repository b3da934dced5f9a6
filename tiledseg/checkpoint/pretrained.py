"""Weights of a published classifier for the encoder of a network: what of a file goes where, and what is said of it.

The first convolution takes the image's bands, whatever the file's had (3, red, green and blue). Bands that the file has
keep their weights, others get the mean of the file's; all are scaled by 3 / bands, so a grey pixel excites the first
layer as it did. With fewer bands than the file's each gets the mean. With as many, weights are the file's to the bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tiledseg.architecture.network import Pretrainable
from tiledseg.checkpoint.check import sha256
from tiledseg.checkpoint.saved_state import Origin
from tiledseg.checkpoint.weights_file import check_finite, check_kind, read_state_dict, strip_prefixes
from tiledseg.errors import CheckpointError
from tiledseg.models.network import GraphNetwork, build_modules

_CLASSIFIER = ("classifier.", "fc.")  # the published network's last layers, which ours have not
_COUNTER = "num_batches_tracked"  # older files lack it, and nothing depends on it


@dataclass(frozen=True)
class FirstWeights:
    """Tensors by our names, in float32 or as the file has them; where they are from; and a line for the user."""

    tensors: dict[str, torch.Tensor]
    origin: Origin
    note: str


def load_pretrained(path: str, network: Pretrainable) -> FirstWeights:
    """The weights of a file for a network's encoder.

    Raises CheckpointError where the file holds none of them, one of another shape or that is not finite, or where it
    was trained with a norm that the network lacks.
    """
    origin = Origin(path, _digest(path))
    with torch.device("meta"):
        module = build_modules(network)
    found = strip_prefixes(read_state_dict(path), _wanted(network))
    sources = _sources(network, module, found)
    held = {name: source for name, source in sources.items() if source in found}
    own = module.state_dict()
    left = _left_out(found, held.values())
    _check(path, network, held, left)
    first = next(iter(sources.values()))
    for name, source in held.items():
        check_kind(path, source, found[source], own[name])
    tensors = {
        name: _fitted(path, source, found[source], own[name].shape, source == first) for name, source in held.items()
    }
    missing = [source for source in sources.values() if source not in found and not source.endswith(_COUNTER)]
    stretched = [s for name, s in held.items() if own[name].shape != found[s].shape]
    bare = len(network.file_names(True)) - len(network.file_names(_norms(found) > 0))
    said: tuple[str | list[str] | int, ...] = (
        f"{len(held)} tensors of {path}",
        stretched and f"'{stretched[0]}' widened to {network.bands} bands",
        missing and f"it lacks {_some(missing)}",
        bare and f"it has no norms, of which {bare} begin at 1 and 0",
        left and f"left out: {_some(left)}",
    )
    return FirstWeights(tensors, origin, f"the encoder begins with {'; '.join(str(part) for part in said if part)}")


def _digest(path: str) -> str:
    try:
        return sha256(Path(path))
    except OSError as error:
        raise CheckpointError(f"model.pretrained is {path}: {error.strerror}; give a file of weights") from None


def _wanted(network: Pretrainable) -> set[str]:
    """Names that a file may give, however its layers are numbered."""
    modules = {name for normed in (False, True) for name in network.file_names(normed).values()}
    leaves = ("weight", "bias", "running_mean", "running_var", _COUNTER)
    return {f"{module}.{leaf}" for module in modules for leaf in leaves}


def _sources(network: Pretrainable, module: GraphNetwork, found: Collection[str]) -> dict[str, str]:
    """The names in the file of the encoder's tensors, by our names."""
    names = network.file_names(_norms(found) > 0)
    modules = {node.replace(".", "-"): source for node, source in names.items()}
    split = {name: name.split(".") for name in module.state_dict()}  # layers, node, leaf
    return {name: f"{modules[node]}.{leaf}" for name, (_, node, leaf) in split.items() if node in modules}


def _left_out(found: Collection[str], taken: Collection[str]) -> list[str]:
    return [name for name in found if name not in set(taken) and not name.startswith(_CLASSIFIER)]


def _check(path: str, network: Pretrainable, held: Mapping[str, str], left: Sequence[str]) -> None:
    if not held:
        raise CheckpointError(
            f"{path} holds none of the weights of {network.in_words.splitlines()[0]}; its first is "
            f"'{(left or ['none'])[0]}'; give a file of this encoder"
        )
    if _norms(left) and not _norms(held):
        raise CheckpointError(
            f"{path} was trained with batch norm, of which {_norms(left)} fit nowhere; set model.norm to batch and "
            "model.encoder to the file's"
        )


def _norms(names: Iterable[str]) -> int:
    return sum(name.endswith(".running_mean") for name in names)


def _fitted(path: str, name: str, tensor: torch.Tensor, shape: torch.Size, first: bool) -> torch.Tensor:
    if tensor.shape != shape:
        if not first or (tensor.shape[:1], tensor.shape[2:]) != (shape[:1], shape[2:]):
            raise CheckpointError(
                f"{path}: '{name}' is {tuple(tensor.shape)}, but the network's is {tuple(shape)}; give a file of this "
                "encoder, and leave model.base_channels out"
            )
        tensor = widened(tensor, shape[1])
    check_finite(path, name, tensor)
    return tensor


def widened(weight: torch.Tensor, bands: int) -> torch.Tensor:
    """A first convolution's weight (out, in, height, width) for another number of bands: see above."""
    mean = weight.mean(1, keepdim=True)
    given = weight.shape[1]
    if bands == given:
        return weight
    kept = weight if bands > given else weight[:, :0]
    return torch.cat([kept, *[mean] * (bands - kept.shape[1])], 1) * (given / bands)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"'{names[0]}'{more}"
