"""Tensors that somebody's module computes from the size of its image alone, as codes of positions: made for the whole
image, wherever a block stands, and cropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from tiledseg.geometry.layers.pixelwise import Cut, Formula, FormulaSlot, Layout, Positions
from tiledseg.models.layers.block import BlockModule, BlockPlace, whole_place
from tiledseg.models.layers.pixelwise import Weights, from_layout, resolve
from tiledseg.models.normalise import Ranks

Size = tuple[int, int]


@dataclass(frozen=True)
class SizeNumber:
    """A number that follows the size: the image's rows (H), columns (W) or pixels (HW), its batch (B); and `more`."""

    kind: str
    more: int = 0

    def of(self, size: Size, batch: int = 1) -> int:
        return {"H": size[0], "W": size[1], "HW": prod(size), "B": batch}[self.kind] + self.more


class Program(nn.Module):
    """Calls of torch in their order, of which the last gives a tensor for an image of any size. A `FormulaSlot` is the
    result of an earlier call, or one of the `given` constants and buffers."""

    def __init__(self, steps: Sequence[Formula], given: Weights) -> None:
        super().__init__()
        self.steps, self.given = steps, given
        self.largest = self.peak = 0  # values of the largest result, and of all that were held at once, at the last run
        last = {slot: at for at, step in enumerate(steps) for slot in _slots((step.arguments, step.keywords))}
        self.ended = [[slot for slot, use in last.items() if use == at] for at in range(len(steps))]

    @torch.no_grad()
    def forward(self, size: Size, device: torch.device, batch: int = 1) -> torch.Tensor:
        made, weights = list[Any](), self.given.tensors()
        self.largest = self.peak = 0

        def filled(value: Any) -> Any:
            match value:
                case SizeNumber():
                    return value.of(size, batch)
                case FormulaSlot():
                    return (weights if value.is_weight else made)[value.index]
                case Cut():
                    return slice(*map(filled, (value.start, value.stop, value.step)))
                case tuple():
                    return tuple(map(filled, value))
            return device if isinstance(value, torch.device) else value

        for step, ended in zip(self.steps, self.ended, strict=True):
            keywords = {name: filled(each) for name, each in step.keywords}
            y = resolve(step.function)(*filled(step.arguments), **keywords)
            made.append(y if step.part is None else y[step.part])
            counts = [each.numel() for each in made if each is not None]
            self.largest, self.peak = max(self.largest, counts[-1]), max(self.peak, sum(counts))
            for slot in ended:
                made[slot] = None
        result: torch.Tensor = made[-1].to(device)
        return result


def _slots(value: Any) -> list[int]:
    """Return the numbers of the earlier results among arguments."""
    if isinstance(value, FormulaSlot):
        return [] if value.is_weight else [value.index]
    return [slot for each in value for slot in _slots(each)] if isinstance(value, tuple) else []


class PositionModule(BlockModule):
    """The module of `geometry.layers.pixelwise.Positions`: its input gives the size alone. `programs`: by the dtype of
    the network, of which an author may take theirs; the first for any other."""

    def __init__(self, layer: Positions, programs: Mapping[torch.dtype, Program], layout: Layout) -> None:
        super().__init__(layer)
        self.dtypes, self.programs, self.layout = list(programs), nn.ModuleList(programs.values()), layout
        # The tensor of a whole image, of which all its tiles take parts, and its size and constants.
        self._last: tuple[object, list[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.on_tile(whole_place(x_BCHW), x_BCHW)

    def on_tile(self, place: BlockPlace, x_BCHW: torch.Tensor) -> torch.Tensor:
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

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.on_tile(place, x_BCHW)
