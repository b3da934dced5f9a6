"""A training step of other people in less memory, by one line around it; the same bits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tiledseg.config.checks import checked
from tiledseg.errors import ConfigError
from tiledseg.memory.device import is_gpu, kind_here
from tiledseg.memory.file_store import FileStore
from tiledseg.memory.mover import HOST, Mover
from tiledseg.memory.offload import Offload, mover_to
from tiledseg.memory.recomputing import Recomputing
from tiledseg.units import parse_bytes

_NO_LIMIT = 1 << 62


@checked
def large_model_support(
    model: nn.Module | None = None,
    *,
    budget: str | int = "16GiB",
    store: str | Path = HOST,
    store_limit: str | int = "64GiB",
) -> Offload:
    """Return a context in which what autograd keeps for the backward pass leaves memory as far as `budget` demands.

    `budget`: bytes ("16GiB", or a number) that autograd alone may hold in memory: not the weights, their gradients, the
    batch, or what the running layer needs for itself. `store`: host, the memory beside a GPU, to which its tensors are
    copied while it computes; for a CPU's a folder on a local disk. `store_limit`: the most bytes that may lie there.
    `model`: the network. Parts of it (blocks of a few layers) are recomputed in the backward pass as far as the budget
    demands, those that take least time for a byte first. Tensors that still do not fit leave for `store`. A model needs
    no store: on a CPU nothing leaves without one. Random numbers are drawn, and running statistics move, once.

    The oldest tensors leave first, and are prefetched in the order of their use. Put it around the loop: file and
    memory are then made once. The context's `figures` say what was held and moved; a line at the end of the block warns
    where that was more than the budget. Raises ConfigError for a size or a folder that cannot be; in the block
    MemoryLimitError where the store is too small, WriteError where its disk is full.
    """
    room, most = _size("budget", budget), _size("store_limit", store_limit)
    weight = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    device = weight.device if weight is not None else torch.empty(0, device=kind_here()).device
    on_host, on_cpu = str(store) == HOST, device.type == "cpu"
    if not on_cpu and not is_gpu(device):
        raise ConfigError(
            f"tensors of {device.type} go nowhere; large_model_support moves those of CPU, CUDA, ROCm, XPU"
        )
    if on_host and on_cpu and model is None:
        raise ConfigError("store is host, the memory beside a GPU's own; give a folder on a local disk, or model")
    if not on_host and not on_cpu:
        raise ConfigError(f"store is {store}, but tensors of {device} go to no file; give host")
    if not on_host:
        FileStore(store, most).close()  # a folder that cannot be is refused here
    mover = Mover if on_host and on_cpu else mover_to(store, device, most)
    support = Offload(mover, room)
    if model is not None:
        support = Recomputing(model, mover, room, _NO_LIMIT if on_host and on_cpu else room)
    nothing_leaves = "give store a folder on a local disk, or use a smaller batch"
    support.warns_above, support.remedy = room, nothing_leaves if on_host and on_cpu else "use a smaller batch"
    return support


def _size(name: str, size: str | int) -> int:
    try:
        return parse_bytes(size if isinstance(size, str) else f"{size}B")
    except ConfigError:
        raise ConfigError(f"{name} is {size!r}; give 16GiB, 16GB, 512MiB or a plain number of bytes") from None
