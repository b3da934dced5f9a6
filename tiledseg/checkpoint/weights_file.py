"""Weights that others have written: a state dict of torch or a safetensors file, as tensors by name.

Nothing in a file is run: torch's are read as weights only.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file

from tiledseg.config.checks import shown
from tiledseg.errors import CheckpointError, first_line

_WRAPPED = ("state_dict", "model_state_dict", "model")  # under which training scripts keep it
_KINDS = (
    (torch.float32, torch.float16, torch.bfloat16, torch.float64),  # not float8, whose scales stand elsewhere
    (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    (torch.complex64, torch.complex128),
)
_PREFIX = re.compile(r"^(module|model|backbone|encoder)\.")  # what wrappers put before a network's own names


def read_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a file by their names, on the CPU: of the file itself, or of the state dict in it.

    Raises CheckpointError, in one line, where there is no such file, or it holds no state dict.
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
    """Raise CheckpointError for a tensor that copying would change: complex, whole or quantised numbers for real ones,
    or no dense values (sparse, nested, on the device meta)."""
    dense = found.layout == torch.strided and not (found.is_nested or found.is_quantized or found.is_meta)
    kind = next((kind for kind in _KINDS if wanted.dtype in kind), (wanted.dtype,))
    if not dense or found.dtype not in kind:
        layout = "nested" if found.is_nested else "meta" if found.is_meta else _word(found.layout)
        raise CheckpointError(
            f"{path}: '{name}' is {_word(found.dtype)}, {layout}, of the network's {_word(wanted.dtype)}, strided; "
            f"give it as {' or '.join(map(_word, kind))}, strided"
        )


def _word(of_torch: torch.dtype | torch.layout) -> str:
    return str(of_torch).removeprefix("torch.")


def check_finite(path: str, name: str, weight: torch.Tensor) -> None:
    """Raise CheckpointError for a weight of which a value is no finite number."""
    if not bool(weight.isfinite().all()):
        raise CheckpointError(f"{path}: '{name}' holds a value that is not finite; give another file")


def strip_prefixes(tensors: Mapping[str, torch.Tensor], wanted: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the tensors by `wanted` names, without the prefixes of wrappers: `module.`, `model.`, `backbone.` and
    `encoder.`. Other tensors lose `module.` alone.

    Raises CheckpointError where two come to one name.
    """
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
