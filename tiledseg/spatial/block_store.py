"""The stored blocks of tensors between segments: values, and sums of gradients.

A block is stored and read whole, on a shelf of `memory.file_store`. Other blocks read thin strips of it. If the shelf
is not memory, strips are kept in memory too, and gradients of strips until their block is taken. So each block goes to
the shelf once, and comes back once for each segment that reads it, whatever the number of its neighbours.

If ranks share the image, strips of values travel once a tensor is complete, strips of gradients before they are used:
one message a tensor, direction and pair of ranks. It cannot deadlock: the ranks of an image share the program, so all
of them exchange the same tensors in the order of the segments, backward in reverse. All receives and sends of a tensor
are posted in one batch before anything waits, as `comm.point_to_point` demands. No messages are sent within a segment.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tiledseg.comm.collectives import Message
from tiledseg.comm.mesh import Axes
from tiledseg.geometry.box import Box
from tiledseg.memory.file_store import MemoryShelf
from tiledseg.spatial.block_network import BlockProgram, Strip, Window

Key = tuple[int, int]  # a tensor, and a block of it
BringInput = Callable[[torch.Tensor], torch.Tensor]
INPUT = 0  # the number of the network's input among the tensors


class _StoredBlocks:
    """Blocks of tensors on a shelf, and strips of them in memory."""

    def __init__(self, program: BlockProgram, shelf: MemoryShelf) -> None:
        self._program, self._shelf = program, shelf
        self._kept: dict[Key, Any] = {}

    def ahead(self, tensor: int, block: int) -> None:
        if (tensor, block) in self._kept:
            self._shelf.ahead(self._kept[tensor, block])

    def _swapped(
        self,
        axes: Axes,
        outgoing: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[Strip]],
        like_BCHW: torch.Tensor,
    ) -> Iterator[tuple[Strip, torch.Tensor]]:
        """Send tensors to peers (numbers in the image), and yield the strips that come from peers: one message a pair
        of ranks, with all tensors in order, channels last. Collective over the ranks of the image."""
        batch, channels = like_BCHW.shape[:2]
        ends = {peer: axes.rank_at(*divmod(peer, self._program.ranks.cols)) for peer in {*outgoing, *receives}}
        sends = [
            Message(ends[peer], torch.cat([x_BCHW.detach().permute(0, 2, 3, 1).reshape(-1) for x_BCHW in own]))
            for peer, own in outgoing.items()
        ]
        arrivals = {
            peer: Message(ends[peer], like_BCHW.new_empty(batch * channels * sum(each.box.area for each in strips)))
            for peer, strips in receives.items()
        }
        axes.point_to_point.start(sends, list(arrivals.values())).wait()
        for peer, strips in receives.items():
            sizes = [batch * channels * strip.box.area for strip in strips]
            for strip, flat in zip(strips, arrivals[peer].tensor.split(sizes), strict=True):
                strip_BHWC = flat.view(batch, *strip.box.shape, channels)
                yield strip, empty_like(like_BCHW, strip.box.shape).copy_(strip_BHWC.permute(0, 3, 1, 2))


class BlockValues(_StoredBlocks):
    """The values of stored tensors, and this rank's part of the input.

    `bring` moves a window of the input to the network's device and layout.
    """

    def __init__(
        self, program: BlockProgram, shelf: MemoryShelf, input_BCHW: torch.Tensor, bring: BringInput | None
    ) -> None:
        super().__init__(program, shelf)
        self._strips: dict[tuple[int, Strip], torch.Tensor] = {}
        self._whole: torch.Tensor | None = input_BCHW
        self._bring = bring or in_one_piece
        self._like = {INPUT: empty_like(self.own_input(program.own[0]), (2, 2))}

    def own_input(self, block: int) -> torch.Tensor:
        return self._of_input(self._program.box(INPUT, block))

    def _of_input(self, box: Box) -> torch.Tensor:
        assert self._whole is not None, "the input is dropped after its last use"
        own = self._program.own_box
        return self._bring(part_in(self._whole, box.clip(own), own))

    def like(self, tensor: int) -> torch.Tensor:
        """Return a small tensor with the batch, channels, dtype, device and layout of a tensor's blocks."""
        return self._like[tensor]

    def put(self, tensor: int, block: int, x_BCHW: torch.Tensor) -> None:
        x_BCHW = in_one_piece(x_BCHW)
        self._like[tensor] = empty_like(x_BCHW, (2, 2))
        if not self._shelf.is_memory:
            boxes, own = list(self._program.strips.get((tensor, block), ())), self._program.box(tensor, block)
            for box, strip_BCHW in zip(boxes, cut_out(x_BCHW, boxes, own), strict=True):
                self._strips[tensor, Strip(block, box)] = strip_BCHW
        self._kept[tensor, block] = self._shelf.put(x_BCHW)

    def read(self, tensor: int, block: int, window: Window) -> torch.Tensor:
        """Return the window of a block, which must not be overwritten."""
        own_box, others = window.own, window.others
        if tensor == INPUT:  # this rank's part is stored as a whole
            own_box = window.box.clip(self._program.own_box)
            others = tuple(strip for strip in others if strip.block not in self._program.own)
            own_BCHW = self._of_input(window.box)
            if not others:
                return own_BCHW
        elif own_box is not None:
            whole_BCHW = self._shelf.get(self._kept[tensor, block])
            own_BCHW = part_in(whole_BCHW, own_box, self._program.box(tensor, block))
            if own_box.shape == window.box.shape:
                return in_one_piece(own_BCHW)
        into_BCHW = empty_like(self._like[tensor], window.box.shape)
        for strip in others:
            part_in(into_BCHW, strip.box, window.box).copy_(self.strip(tensor, strip))
        if own_box is not None:
            part_in(into_BCHW, own_box, window.box).copy_(own_BCHW)
        return into_BCHW

    def strip(self, tensor: int, strip: Strip) -> torch.Tensor:
        if (tensor, strip) in self._strips:
            return self._strips[tensor, strip]
        if tensor == INPUT:
            return self._of_input(strip.box)
        whole_BCHW = self._shelf.get(self._kept[tensor, strip.block])
        return part_in(whole_BCHW, strip.box, self._program.box(tensor, strip.block))

    def swap(self, tensor: int, axes: Axes) -> None:
        """Receive the strips of other ranks that this rank's blocks read. Collective over the ranks of the image."""
        traffic = self._program.traffic.get(tensor)
        if traffic is not None:
            own = {peer: [self.strip(tensor, each) for each in strips] for peer, strips in traffic.sends.items()}
            for strip, x_BCHW in self._swapped(axes, own, traffic.receives, self._like[tensor]):
                self._strips[tensor, strip] = x_BCHW

    def drop(self, tensor: int) -> None:
        """Free a tensor after its last use."""
        if tensor == INPUT:
            self._whole = None
        for key in [key for key in self._kept if key[0] == tensor]:
            self._shelf.free(self._kept.pop(key))
        for place in [place for place in self._strips if place[0] == tensor]:
            del self._strips[place]

    def clear(self) -> None:
        for tensor in list(self._like):
            self.drop(tensor)


class BlockGradients(_StoredBlocks):
    """The sums of gradients of stored tensors: whole blocks, and strips from neighbours. A block's gradients are summed
    in the same order on every store."""

    def __init__(self, program: BlockProgram, shelf: MemoryShelf, values: BlockValues) -> None:
        super().__init__(program, shelf)
        self._values = values
        self._strips: dict[Key, list[tuple[Box, torch.Tensor]]] = {}

    def add(self, tensor: int, block: int, window: Window, g_BCHW: torch.Tensor) -> None:
        """Add the gradient of a block's window."""
        strips_BCHW = cut_out(g_BCHW, [strip.box for strip in window.others], window.box)
        for strip, strip_BCHW in zip(window.others, strips_BCHW, strict=True):
            self._strips.setdefault((tensor, strip.block), []).append((strip.box, strip_BCHW))
        if window.own is None:
            return
        own_BCHW, box = part_in(g_BCHW, window.own, window.box), self._program.box(tensor, block)
        sum_BCHW = self._pop((tensor, block))
        if sum_BCHW is not None:
            part_in(sum_BCHW, window.own, box).add_(own_BCHW)
        elif window.own == box:
            sum_BCHW = in_one_piece(own_BCHW, own_BCHW.shape != g_BCHW.shape)
        else:
            sum_BCHW = empty_like(own_BCHW, box.shape).zero_()
            part_in(sum_BCHW, window.own, box).copy_(own_BCHW)
        self._kept[tensor, block] = self._shelf.put(sum_BCHW)

    def take(self, tensor: int, block: int) -> torch.Tensor | None:
        """Return the sum of a block's gradients, and free it; None if nothing has been added."""
        total_BCHW, own = self._pop((tensor, block)), self._program.box(tensor, block)
        for box, strip_BCHW in self._strips.pop((tensor, block), ()):
            if total_BCHW is None:
                total_BCHW = empty_like(strip_BCHW, own.shape).zero_()
            part_in(total_BCHW, box, own).add_(strip_BCHW)
        return total_BCHW

    def swap(self, tensor: int, axes: Axes) -> None:
        """Send the gradients of strips to the ranks that own them. Collective over the ranks of the image."""
        traffic = self._program.traffic.get(tensor)
        if traffic is not None:
            own: dict[int, list[torch.Tensor]] = {}
            for peer, strips in traffic.receives.items():
                for strip in strips:  # sum, and drop, the gradients of another rank's strip
                    total_BCHW = empty_like(self._values.like(tensor), strip.box.shape).zero_()
                    parts = self._strips.pop((tensor, strip.block), [])
                    for box, strip_BCHW in parts:
                        if box == strip.box:
                            total_BCHW.add_(strip_BCHW)
                    if others := [each for each in parts if each[0] != strip.box]:
                        self._strips[tensor, strip.block] = others
                    own.setdefault(peer, []).append(total_BCHW)
            for strip, g_BCHW in self._swapped(axes, own, traffic.sends, self._values.like(tensor)):
                self._strips.setdefault((tensor, strip.block), []).append((strip.box, g_BCHW))

    def _pop(self, key: Key) -> torch.Tensor | None:
        if key not in self._kept:
            return None
        what = self._kept.pop(key)
        gradient_BCHW = self._shelf.get(what)
        self._shelf.free(what)
        return gradient_BCHW

    def clear(self) -> None:
        for what in self._kept.values():
            self._shelf.free(what)
        self._kept.clear()
        self._strips.clear()


def cut_out(x_BCHW: torch.Tensor, boxes: Sequence[Box], whole: Box) -> list[torch.Tensor]:
    """Return copies of the boxes of x, which covers `whole`, each in the layout of x.

    On a CPU the copies of one block have a memory mapping of their own. On the heap they would outlive the block's
    large tensors and split their space: the next block's tensors would not fit, and the heap would grow by far more
    than the strips (from 320 to 570 MiB in a step of `benchmarks.large_model_support.blocks`).
    """
    parts = [part_in(x_BCHW, box, whole).detach() for box in boxes]
    if x_BCHW.device.type != "cpu" or not parts:
        return [in_one_piece(part, copy=True) for part in parts]
    sizes = [math.prod(part.shape) for part in parts]
    mapping = mmap.mmap(-1, max(1, sum(sizes) * x_BCHW.element_size()))
    flat = torch.from_numpy(np.frombuffer(mapping, np.uint8)).view(x_BCHW.dtype)
    order = (0, 2, 3, 1) if _format(x_BCHW) is torch.channels_last else (0, 1, 2, 3)
    back = (0, 3, 1, 2) if order[1] == 2 else order
    copies = []
    for own, part in zip(flat.split(sizes), parts, strict=True):
        copies.append(own.view(part.permute(order).shape).permute(back).copy_(part))
    return copies


def in_one_piece(x_BCHW: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """Return the tensor without gaps, in its layout; with `copy` always a copy, which keeps no larger tensor alive."""
    if copy:
        return x_BCHW.clone(memory_format=_format(x_BCHW))
    return x_BCHW.contiguous(memory_format=_format(x_BCHW))


def empty_like(x_BCHW: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return an uninitialised tensor like x, of another height and width."""
    full = (*x_BCHW.shape[:2], *shape)
    return torch.empty(full, dtype=x_BCHW.dtype, device=x_BCHW.device, memory_format=_format(x_BCHW))


def _format(x_BCHW: torch.Tensor) -> torch.memory_format:
    last = x_BCHW.stride(1) == 1 and x_BCHW.shape[1] > 1
    return torch.channels_last if last else torch.contiguous_format


def part_in(x_BCHW: torch.Tensor, box: Box, whole: Box) -> torch.Tensor:
    """Return the view of `box` in a tensor that covers `whole`."""
    return x_BCHW if box == whole else x_BCHW[(slice(None), slice(None), *box.relative_to(whole).slices)]
