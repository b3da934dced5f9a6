"""Tensors that a user's module computes only from its image's size, such as position encodings: computed for the whole
image, and cropped to a block or tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from tiledseg.geometry.layers.pixelwise import Formula, FormulaSlot, Layout, Positions
from tiledseg.models.layers.block import BlockModule, BlockPlace
from tiledseg.models.layers.pixelwise import Weights, filled, from_layout, resolve

Size = tuple[int, int]


@dataclass(frozen=True)
class SizeNumber:
    """A number that depends on the size: rows (H), columns (W), pixels (HW) or batch (B), plus `more`."""

    kind: str
    more: int = 0

    def of(self, size: Size, batch: int = 1) -> int:
        return {"H": size[0], "W": size[1], "HW": prod(size), "B": batch}[self.kind] + self.more


class Program(nn.Module):
    """A sequence of torch calls, of which the last returns a tensor for an image of any size. A `FormulaSlot` is the
    result of an earlier call, or one of the `given` constants and buffers."""

    def __init__(self, steps: Sequence[Formula], given: Weights) -> None:
        super().__init__()
        self.steps, self.given = steps, given
        self.largest = self.peak = 0  # of the last run: elements of the largest result, and of all held at once
        last = {slot: at for at, step in enumerate(steps) for slot in _slots((step.arguments, step.keywords))}
        self.ended = [[slot for slot, use in last.items() if use == at] for at in range(len(steps))]

    @torch.no_grad()
    def forward(self, size: Size, device: torch.device, batch: int = 1) -> torch.Tensor:
        made, weights = list[Any](), self.given.tensors()
        self.largest = self.peak = 0

        def here(value: Any) -> Any:
            if isinstance(value, SizeNumber):
                return value.of(size, batch)
            return device if isinstance(value, torch.device) else value

        for step, ended in zip(self.steps, self.ended, strict=True):
            keywords = {name: filled(each, made, weights, here) for name, each in step.keywords}
            y = resolve(step.function)(*filled(step.arguments, made, weights, here), **keywords)
            made.append(y if step.part is None else y[step.part])
            counts = [each.numel() for each in made if each is not None]
            self.largest, self.peak = max(self.largest, counts[-1]), max(self.peak, sum(counts))
            for slot in ended:
                made[slot] = None
        return made[-1].to(device)


def _slots(value: Any) -> list[int]:
    """Return the numbers of the earlier results that arguments contain."""
    if isinstance(value, FormulaSlot):
        return [] if value.is_weight else [value.index]
    return [slot for each in value for slot in _slots(each)] if isinstance(value, tuple) else []


class PositionModule(BlockModule):
    """The module of `geometry.layers.pixelwise.Positions`: uses only its input's size. `programs`: by the dtype of the
    input, from which an author may derive others; the first for any other dtype."""

    def __init__(self, layer: Positions, programs: Mapping[torch.dtype, Program], layout: Layout) -> None:
        super().__init__(layer)
        self.dtypes, self.programs, self.layout = list(programs), nn.ModuleList(programs.values()), layout
        # The last image's state, constants, and whole tensor, for the other tiles of the image.
        self._last: tuple[object, list[torch.Tensor], torch.Tensor] | None = None

    def on_block(self, place: BlockPlace, ranks: Any, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        (x_BCHW,) = inputs_BCHW
        size = place.row.sizes[0], place.col.sizes[0]
        program: Any = self.programs[self.dtypes.index(x_BCHW.dtype) if x_BCHW.dtype in self.dtypes else 0]
        device, given = x_BCHW.device, program.given.tensors()
        state = size, x_BCHW.dtype, device, torch.is_autocast_enabled(device.type)
        last = None if torch.compiler.is_compiling() else self._last
        if last is None or last[0] != state or not all(map(torch.equal, last[1], given)):
            y = program(size, device)
            y = y.to(torch.promote_types(y.dtype, x_BCHW.dtype))
            pixels = {"H": size[0], "W": size[1]}
            y = y.reshape((1,) * (len(self.layout.dims) - y.dim()) + tuple(y.shape))
            y = y.expand([prod(pixels[a] for a in dim) if dim and dim[0] in pixels else -1 for dim in self.layout.dims])
            last = state, [each.clone() for each in given], from_layout(y, self.layout, (1, 0, *size))
            self._last = None if torch.compiler.is_compiling() else last
        part_BCHW = last[2][:, :, place.row.given.slice, place.col.given.slice]
        return part_BCHW.clone().expand(len(x_BCHW), -1, -1, -1)
