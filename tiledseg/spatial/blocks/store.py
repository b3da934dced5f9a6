"""Where the blocks of tensors lie between segments: values, and gradients that are still being added up.

A block is put somewhere whole and read whole; `Shelf` says where. What other blocks read of it are thin strips, which
stay in memory where a shelf is slow, as gradients of such strips do until their block is taken. So each block goes to
the shelf once, and comes back once for each segment that takes it, however many neighbours look at its edges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from tiledseg.geometry.box import Box
from tiledseg.spatial.blocks.program import BlockProgram, Strip, Window
from tiledseg.spatial.blocks.strips import cut_out

Key = tuple[int, int]  # a tensor, and a block of it


class Like(NamedTuple):
    """What the blocks of a tensor have in common, on all ranks."""

    batch: int
    channels: int
    dtype: torch.dtype
    device: torch.device
    layout: torch.memory_format

    @staticmethod
    def of(x_BCHW: torch.Tensor) -> Like:
        return Like(x_BCHW.shape[0], x_BCHW.shape[1], x_BCHW.dtype, x_BCHW.device, _format(x_BCHW))

    def values_of(self, strip: Strip) -> int:
        """How many a strip has."""
        return self.batch * self.channels * strip.there.area

    def shaped(self, flat: torch.Tensor, strip: Strip) -> torch.Tensor:
        """A strip that has travelled channels last."""
        x_BCHW = flat.view(self.batch, *strip.there.shape, self.channels).permute(0, 3, 1, 2)
        return x_BCHW.contiguous(memory_format=self.layout)

    def zeros(self, shape: tuple[int, int]) -> torch.Tensor:
        full = self.batch, self.channels, *shape
        return torch.empty(full, dtype=self.dtype, device=self.device, memory_format=self.layout).zero_()


Bring = Callable[[torch.Tensor], torch.Tensor]
INPUT = 0  # the tensor that is not made


class Shelf(Protocol):
    """A place for tensors. `is_memory`: they are at hand in it as they are, and must not be written over."""

    is_memory: bool

    def put(self, x_BCHW: torch.Tensor) -> Any:
        """By what `get` and `free` know it. It must not change any more."""

    def ahead(self, what: Any) -> None:
        """It will be got soon."""

    def get(self, what: Any) -> torch.Tensor: ...

    def free(self, what: Any) -> None: ...

    def rest(self) -> None:
        """Tensors of other sizes come next."""

    def close(self) -> None: ...


class BlockValues:
    """The values of stored tensors."""

    def __init__(self, program: BlockProgram, shelf: Shelf) -> None:
        self._program, self._shelf = program, shelf
        self._kept: dict[Key, Any] = {}
        self._strips: dict[tuple[int, int, Box], torch.Tensor] = {}
        self._like: dict[int, Like] = {}
        self._whole: torch.Tensor | None = None
        self._bring: Bring = in_one_piece

    def put_input(self, x_BCHW: torch.Tensor, bring: Bring | None = None) -> None:
        """This rank's part of the network's input, at hand in one piece. `bring`: what makes a window of it the
        network's input, on its device and in its layout."""
        self._whole = x_BCHW
        self._bring = bring or in_one_piece
        self._like[INPUT] = Like.of(self.own_input(self._program.own[0]))

    def own_input(self, block: int) -> torch.Tensor:
        """A block of the input."""
        return self._of_input(self._program.box(INPUT, block))

    def _of_input(self, box: Box) -> torch.Tensor:
        """Of this rank's part of the input what lies in `box`."""
        assert self._whole is not None, "it has been put"
        own = self._program.own_box
        return self._bring(_part(self._whole, box.clip(own).relative_to(own)))

    def like(self, tensor: int) -> Like:
        """How this rank's blocks of a tensor are, of which one has been put."""
        return self._like[tensor]

    def put(self, tensor: int, block: int, x_BCHW: torch.Tensor) -> None:
        x_BCHW = in_one_piece(x_BCHW)
        self._like[tensor] = Like.of(x_BCHW)
        if not self._shelf.is_memory:
            boxes = self._program.strips.get((tensor, block), ())
            for box, strip_BCHW in zip(boxes, cut_out(x_BCHW, boxes), strict=True):
                self._strips[tensor, block, box] = strip_BCHW
        self._kept[tensor, block] = self._shelf.put(x_BCHW)

    def read(self, tensor: int, block: int, window: Window) -> torch.Tensor:
        """What a block reads of a tensor; not to be written over."""
        if tensor == INPUT:
            return self._input_window(window)
        own = None if window.own is None else self._shelf.get(self._kept[tensor, block])
        if own is not None and window.own is not None and window.own.here.shape == window.box.shape:
            return in_one_piece(_part(own, window.own.there))
        parts = [(piece, self.strip(tensor, Strip(piece.block, piece.there))) for piece in window.others]
        if own is not None and window.own is not None:
            parts.append((window.own, _part(own, window.own.there)))
        into_BCHW = empty_like(parts[-1][1], window.box.shape)
        for piece, part_BCHW in parts:
            _part(into_BCHW, piece.here).copy_(part_BCHW)
        return into_BCHW

    def _input_window(self, window: Window) -> torch.Tensor:
        foreign = [piece for piece in window.others if piece.block not in self._program.own]
        own_BCHW = self._of_input(window.box)
        if not foreign:
            return own_BCHW
        into_BCHW = empty_like(own_BCHW, window.box.shape)
        at = window.box.clip(self._program.own_box).relative_to(window.box)
        _part(into_BCHW, at).copy_(own_BCHW)
        for piece in foreign:
            _part(into_BCHW, piece.here).copy_(self._strips[INPUT, piece.block, piece.there])
        return into_BCHW

    def strip(self, tensor: int, strip: Strip) -> torch.Tensor:
        """What another block reads of one."""
        block, there = strip
        if (tensor, block, there) in self._strips:
            return self._strips[tensor, block, there]
        if tensor == INPUT:
            return _part(self.own_input(block), there)
        return _part(self._shelf.get(self._kept[tensor, block]), there)

    def receive(self, tensor: int, strip: Strip, x_BCHW: torch.Tensor) -> None:
        """A strip of another rank's block."""
        self._strips[tensor, strip.block, strip.there] = x_BCHW

    def ahead(self, tensor: int, block: int, window: Window) -> None:
        """The block will soon read its window."""
        if window.own is not None and (tensor, block) in self._kept:
            self._shelf.ahead(self._kept[tensor, block])

    def drop(self, tensor: int) -> None:
        """Nobody reads the tensor any more."""
        if tensor == INPUT:
            self._whole = None
        for key in [key for key in self._kept if key[0] == tensor]:
            self._shelf.free(self._kept.pop(key))
        for place in [place for place in self._strips if place[0] == tensor]:
            del self._strips[place]

    def clear(self) -> None:
        """Nothing is kept any more."""
        for tensor in {INPUT} | {key[0] for key in self._kept} | {place[0] for place in self._strips}:
            self.drop(tensor)


class BlockGradients:
    """The gradients of stored tensors, as they are added up: of blocks whole, of neighbours in strips. Each block's are
    summed in one order, wherever they lie."""

    def __init__(self, program: BlockProgram, shelf: Shelf) -> None:
        self._program, self._shelf = program, shelf
        self._kept: dict[Key, Any] = {}
        self._strips: dict[Key, list[tuple[Box, torch.Tensor]]] = {}

    def add(self, tensor: int, block: int, window: Window, g_BCHW: torch.Tensor) -> None:
        """The gradient of what a block has read."""
        strips_BCHW = cut_out(g_BCHW, [piece.here for piece in window.others])
        for piece, strip_BCHW in zip(window.others, strips_BCHW, strict=True):
            self._strips.setdefault((tensor, piece.block), []).append((piece.there, strip_BCHW))
        if window.own is None:
            return
        own_BCHW, key = _part(g_BCHW, window.own.here), (tensor, block)
        before_BCHW = self._pop(key)
        if before_BCHW is not None:
            sum_BCHW = before_BCHW
            _part(sum_BCHW, window.own.there).add_(own_BCHW)
        elif window.own.there.shape == self._program.box(tensor, block).shape:
            sum_BCHW = in_one_piece(own_BCHW, own_BCHW.shape != g_BCHW.shape)
        else:
            sum_BCHW = empty_like(own_BCHW, self._program.box(tensor, block).shape).zero_()
            _part(sum_BCHW, window.own.there).copy_(own_BCHW)
        self._kept[key] = self._shelf.put(sum_BCHW)

    def take(self, tensor: int, block: int) -> torch.Tensor | None:
        """All that has been added to a block's gradient; None where nothing has."""
        total_BCHW = self._pop((tensor, block))
        for box, strip_BCHW in self._strips.pop((tensor, block), ()):
            if total_BCHW is None:
                total_BCHW = empty_like(strip_BCHW, self._program.box(tensor, block).shape).zero_()
            _part(total_BCHW, box).add_(strip_BCHW)
        return total_BCHW

    def leave(self, tensor: int, strip: Strip, like: Like) -> torch.Tensor:
        """All that has been added to the gradient of another rank's strip: it is gone then."""
        total_BCHW = like.zeros(strip.there.shape)
        left = self._strips.pop((tensor, strip.block), [])
        for box, strip_BCHW in left:
            if box == strip.there:
                total_BCHW.add_(strip_BCHW)
        others = [each for each in left if each[0] != strip.there]
        if others:
            self._strips[tensor, strip.block] = others
        return total_BCHW

    def receive(self, tensor: int, strip: Strip, g_BCHW: torch.Tensor) -> None:
        """The gradient of a strip that another rank has read."""
        self._strips.setdefault((tensor, strip.block), []).append((strip.there, g_BCHW))

    def ahead(self, tensor: int, block: int) -> None:
        """The block's gradient is soon added to, or taken."""
        if (tensor, block) in self._kept:
            self._shelf.ahead(self._kept[tensor, block])

    def _pop(self, key: Key) -> torch.Tensor | None:
        if key not in self._kept:
            return None
        what = self._kept.pop(key)
        found = self._shelf.get(what)
        self._shelf.free(what)
        return found

    def clear(self) -> None:
        """Nothing is kept any more."""
        for what in self._kept.values():
            self._shelf.free(what)
        self._kept.clear()
        self._strips.clear()


def in_one_piece(x_BCHW: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """The tensor without gaps, in its order of dims; a `copy` where it would hold a larger one alive."""
    if copy:
        return x_BCHW.clone(memory_format=_format(x_BCHW))
    return x_BCHW.contiguous(memory_format=_format(x_BCHW))


def empty_like(x_BCHW: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Of another height and width."""
    full = (*x_BCHW.shape[:2], *shape)
    return torch.empty(full, dtype=x_BCHW.dtype, device=x_BCHW.device, memory_format=_format(x_BCHW))


def _format(x_BCHW: torch.Tensor) -> torch.memory_format:
    last = x_BCHW.stride(1) == 1 and x_BCHW.shape[1] > 1
    return torch.channels_last if last else torch.contiguous_format


def _part(x_BCHW: torch.Tensor, box: Box) -> torch.Tensor:
    return x_BCHW if box.shape == x_BCHW.shape[2:] else x_BCHW[(slice(None), slice(None), *box.slices)]
