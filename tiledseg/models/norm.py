"""The norms of networks: torch's modules, computed on the CPU by `normalise`.

On a GPU torch's own kernels run: they accumulate by Welford's rule in float32 and are faster there. Under torch.compile
torch's norms run too, since it writes kernels itself. An image of one pixel goes to torch, which raises its own error.
"""

from __future__ import annotations

import torch
from torch import nn

from tiledseg.models.normalise import normed, takes_statistics


class PixelNorm(nn.LayerNorm):
    """Layer norm over the channels of each pixel."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class InstanceNorm(nn.InstanceNorm2d):
    """Instance norm, without running statistics. For channels first torch's kernel is faster, but misreads a
    channels-last gradient (2.13, one image), which is therefore made contiguous."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if _is_own(input) and input.is_contiguous(memory_format=torch.channels_last):
            return normed(self, [input])[0]
        made = super().forward(input)
        if made.requires_grad and not torch.compiler.is_compiling():
            made.register_hook(torch.Tensor.contiguous)
        return made


class GroupNorm(nn.GroupNorm):
    """Group norm."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return normed(self, [input])[0] if _is_own(input) else super().forward(input)


class BatchNorm(nn.BatchNorm2d):
    """Batch norm; in evaluation torch's. `in_place_of`: the user's own norm, whose mode it always shares. `still`: it
    stays in evaluation, with constant running statistics."""

    in_place_of: tuple[nn.Module, ...] = ()
    own_mode: bool
    still = False

    @property
    def training(self) -> bool:
        return self.in_place_of[0].training and not self.still if self.in_place_of else self.own_mode

    @training.setter
    def training(self, mode: bool) -> None:
        # torch 2.8 compiles a look into `__dict__` as this property.
        self.own_mode = self.__dict__["training"] = mode and not self.still
        for norm in self.in_place_of:
            norm.training = mode

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not takes_statistics(self) or not _is_own(input):
            return super().forward(input)
        return normed(self, [input])[0]


def _is_own(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.shape[2] * x.shape[3] > 1 and not torch.compiler.is_compiling()
