"""Memory that depends on the input, followed kernel by kernel: compiled code passes the recorder of calls by."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tiledseg.errors import ConfigError
from tiledseg.tracing.calls import calling_line, tensors_of
from tiledseg.tracing.functions.names import ALL_PIXELS

WIDEST = 2048  # values a pixel: a run ends where a kernel makes more of the input


class PairsError(ConfigError):
    """The refusal of a tensor of every pixel with every other."""


class Kernels(TorchDispatchMode):
    """The storages that depend on the input, those made since it is entered, and tensors written since last asked.

    Of tensors without values (fakes) it notes the size alone; a number read of them is 1.
    """

    def __init__(self, x_BCHW: torch.Tensor) -> None:
        super().__init__()
        self.reads = False  # a number was read of what depends on the input
        self.draws = False  # random numbers were drawn
        self._most = WIDEST * x_BCHW[:, :1].numel()
        self._kept: dict[int, torch.UntypedStorage] = {}  # by address: kept, so that no address is used again
        self.older: set[int | None] = set()  # addresses of what was there before: weights, constants
        self._dependent: dict[int, int] = {}  # addresses: start and stop
        self.written: list[torch.Tensor] = []  # since it was last emptied
        self._meet(x_BCHW, True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            taken = tensors_of((args, kwargs))
            reads = func is torch.ops.aten._local_scalar_dense.default
            if reads and isinstance(args[0], FakeTensor):
                return torch.ones((), dtype=args[0].dtype).item()
            before = {address(tensor) for tensor in taken}
            self.older |= {start for start in before if start and start not in self._kept}
            depends = not self._dependent.keys().isdisjoint(before)
            result = func(*args, **kwargs)
            self.draws |= torch.Tag.nondeterministic_seeded in func.tags
            self.reads |= depends and reads
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = tensors_of(args[place] if place < len(args) else kwargs.get(argument.name))
                    self.written += [tensor for tensor in written if not isinstance(tensor, FakeTensor)]
                    for tensor in written if depends else ():
                        self._meet(tensor, True)
            for tensor in tensors_of(result):
                self._meet(tensor, depends)
                if depends and tensor.numel() > self._most:
                    raise PairsError(
                        f"the module cannot be computed exactly on tiles: at {calling_line()} it {ALL_PIXELS}"
                    )
        return result

    def _meet(self, tensor: torch.Tensor, depends: bool) -> None:
        if start := address(tensor):
            storage = self._kept.setdefault(start, tensor.untyped_storage())
            if depends:
                self._dependent[start] = start + storage.nbytes()

    def depends(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor lies in memory that depends on the input, whoever made it."""
        start = address(tensor)
        return start is None or any(begin <= start < stop for begin, stop in self._dependent.items())


def address(tensor: torch.Tensor) -> int | None:
    """Return where the tensor's storage begins, 0 for an empty one, a number of its own for one without values; None
    where it has none (of `torch.vmap`)."""
    try:
        storage = tensor.untyped_storage()
        return storage._cdata if isinstance(tensor, FakeTensor) else storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
