"""A copy of a run's tensors that stays as it is while the run goes on: what is written in the background is a copy."""

from __future__ import annotations

import torch


class Snapshot:
    """Memory on the host for one copy of each tensor, by name, taken anew at each save. The law: what is copied has the
    bits that the tensor has at that moment, whatever comes after.

    The memory stays for the next copy: fresh memory would cost more time than the copy. A copy first lies as its tensor
    does (channels last, say), which is five times as fast as to rearrange it; `settle` does that later, in its place.
    A GPU's tensors are copied into pinned memory, all on their way together until `finish`.
    """

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self._strides: dict[str, tuple[int, ...]] = {}
        self._devices: set[torch.device] = set()

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of `tensor`, on the CPU: of a GPU's whole after `finish`, and contiguous after `settle`."""
        source = tensor.detach()
        held = self._held.get(name)
        if held is None or held.shape != source.shape or held.dtype != source.dtype:
            held = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
            self._held[name], self._strides[name] = held, held.stride()
        if source.is_cuda:
            self._devices.add(source.device)
        return held.as_strided_(held.shape, self._strides[name]).copy_(source, non_blocking=True)

    def finish(self) -> None:
        """Every copy is whole: what they were copied from may change."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._devices.clear()

    def settle(self) -> None:
        """Every copy is contiguous, in the memory that it has. For the thread that writes them."""
        for held in self._held.values():
            if not held.is_contiguous():
                values = held.contiguous()
                held.as_strided_(values.shape, values.stride()).copy_(values)

    @property
    def bytes(self) -> int:
        """What the copies take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._held.values())
