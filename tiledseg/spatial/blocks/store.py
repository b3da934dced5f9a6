"""Where the blocks of tensors lie between segments: values, and gradients that are still being added up.

A block is put somewhere whole and read whole; `Shelf` says where. What other blocks read of it are thin strips, which
stay in memory where a shelf is slow, as gradients of such strips do until their block is taken. So each block goes to
the shelf once, and comes back once for each segment that takes it, however many neighbours look at its edges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from tiledseg.geometry.box import Box
from tiledseg.spatial.blocks.program import BlockProgram, Piece, Window

Key = tuple[int, int]  # a tensor, and a block of it
Bring = Callable[[torch.Tensor], torch.Tensor]


class Shelf(Protocol):
    """A place for tensors. `is_memory`: they are at hand in it as they are, and must not be written over."""

    is_memory: bool

    def put(self, x_BCHW: torch.Tensor) -> Any:
        """By what `get` and `free` know it. It must not change any more."""

    def get(self, what: Any) -> torch.Tensor: ...

    def free(self, what: Any) -> None: ...

    def close(self) -> None: ...


class BlockValues:
    """The values of stored tensors."""

    def __init__(self, program: BlockProgram, shelf: Shelf) -> None:
        self._program, self._shelf = program, shelf
        self._kept: dict[Key, Any] = {}
        self._strips: dict[tuple[int, int, Box], torch.Tensor] = {}
        self._whole: dict[int, torch.Tensor] = {}
        self._bring: Bring = in_one_piece

    def put_whole(self, tensor: int, x_BCHW: torch.Tensor, bring: Bring | None = None) -> None:
        """A tensor that is at hand in one piece: the network's input. `bring`: what makes a part of it the network's
        input, on its device and in its layout."""
        self._whole[tensor] = x_BCHW
        self._bring = bring or in_one_piece

    def own_part(self, tensor: int, block: int) -> torch.Tensor:
        """A block of what has been put in one piece."""
        return self._bring(_part(self._whole[tensor], self._program.box(tensor, block)))

    def put(self, tensor: int, block: int, x_BCHW: torch.Tensor) -> None:
        x_BCHW = in_one_piece(x_BCHW)
        if not self._shelf.is_memory:
            for box in self._program.strips.get((tensor, block), ()):
                self._strips[tensor, block, box] = in_one_piece(_part(x_BCHW, box), True)
        self._kept[tensor, block] = self._shelf.put(x_BCHW)

    def read(self, tensor: int, block: int, window: Window) -> torch.Tensor:
        """What a block reads of a tensor; not to be written over."""
        if tensor in self._whole:
            return self._bring(_part(self._whole[tensor], window.box))
        own = None if window.own is None else self._shelf.get(self._kept[tensor, block])
        if own is not None and window.own is not None and window.own.here.shape == window.box.shape:
            return in_one_piece(_part(own, window.own.there))
        parts = [(piece, self._strip(tensor, piece)) for piece in window.others]
        if own is not None and window.own is not None:
            parts.append((window.own, _part(own, window.own.there)))
        into_BCHW = empty_like(parts[-1][1], window.box.shape)
        for piece, part_BCHW in parts:
            _part(into_BCHW, piece.here).copy_(part_BCHW)
        return into_BCHW

    def _strip(self, tensor: int, piece: Piece) -> torch.Tensor:
        if self._shelf.is_memory:
            return _part(self._shelf.get(self._kept[tensor, piece.block]), piece.there)
        return self._strips[tensor, piece.block, piece.there]

    def drop(self, tensor: int) -> None:
        """Nobody reads the tensor any more."""
        self._whole.pop(tensor, None)
        for block in range(self._program.blocks):
            if (tensor, block) in self._kept:
                self._shelf.free(self._kept.pop((tensor, block)))
            for box in self._program.strips.get((tensor, block), ()):
                self._strips.pop((tensor, block, box), None)

    def clear(self) -> None:
        """Nothing is kept any more."""
        for tensor in {tensor for tensor, _ in self._kept} | set(self._whole):
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
        for piece in window.others:
            strip_BCHW = in_one_piece(_part(g_BCHW, piece.here), True)
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
