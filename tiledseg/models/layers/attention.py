"""Attention over the image, on one rank or over the ranks that share it.

Each rank in turn broadcasts its keys and values, so a rank holds those of one other rank at a time: memory falls as
1 / ranks. All ranks merge them in the order of ranks, by a running maximum and sum (Milakov and Gimelshein, 2018), so
results are reproducible. Weights are computed for some queries at a time, and recomputed in the backward pass (Dao et
al., 2022), so that no tensor of pairs is kept. Backward repeats the broadcasts, and a sum over the ranks gives each
rank the gradient of its block.

It cannot deadlock: each broadcast and sum is one call of all ranks of the image, in the order of ranks and nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional

from tiledseg.geometry.box import Interval
from tiledseg.geometry.layers.joins import WEIGHTS_AT_ONCE, ImageAttention, ImageProducts
from tiledseg.models.layers.block import BlockModule, BlockPlace, DimPlace, cropped
from tiledseg.models.normalise import Ranks, summed


class PassingRanks(Ranks, Protocol):
    """The ranks that share an image, with the communicator's broadcast."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None: ...


class AttentionOverImage(BlockModule):
    """softmax(factor x queries x keys) x values over all pixels of the image, in `heads` parts of the channels.

    Inputs and output: (batch, heads x channels of a head, height, width). `rows` and `cols` give the smaller size of
    keys and values. Weights are float32, or float64 for float64 inputs.
    """

    def __init__(self, rows: ImageAttention, cols: ImageAttention) -> None:
        super().__init__(rows, cols)
        self.heads, self.factor = rows.heads, rows.factor

    def forward(self, *qkv_BCHW: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (_tokens(x_BCHW, self.heads) for x_BCHW in qkv_BCHW)
        made = functional.scaled_dot_product_attention(queries, keys, values, scale=self.factor)
        return _image(made, qkv_BCHW[0])

    def on_block(self, place: BlockPlace, ranks: Any, *qkv_BCHW: torch.Tensor) -> torch.Tensor:
        if place.is_whole:
            return self.forward(*qkv_BCHW)
        dims = (place.row, self.rows), (place.col, self.cols)
        own = [self._own(at, layer) for at, layer in dims]
        parts = qkv_BCHW[0], *(cropped(x_BCHW, *own) for x_BCHW in qkv_BCHW[1:])
        tokens = [_tokens(x_BCHW, self.heads) for x_BCHW in parts]
        rows, cols = ([layer.required_input(block, 1).size for block in at.blocks] for at, layer in dims)
        counts = [height * width for height in rows for width in cols]
        return _image(_Passing.apply(*tokens, self.factor, counts, ranks), parts[0])

    def _own(self, at: DimPlace, layer: Any) -> slice:
        """Return the place of the rank's own keys in its local tensor."""
        first = Interval(0, 0) if at.whole else layer.required_input(at.read, 1)
        return layer.required_input(at.owned, 1).relative_to(first.start).slice


def _tokens(x_BCHW: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a view of shape (batch, heads, pixels, channels of one head)."""
    return x_BCHW.permute(0, 2, 3, 1).flatten(1, 2).unflatten(2, (heads, -1)).transpose(1, 2)


def _image(y_BAND: torch.Tensor, like_BCHW: torch.Tensor) -> torch.Tensor:
    """Return tokens as an image with the rows and columns of `like_BCHW`."""
    return y_BAND.transpose(1, 2).flatten(2).unflatten(1, like_BCHW.shape[2:]).permute(0, 3, 1, 2)


class _Passing(torch.autograd.Function):
    """Attention of a rank's queries over the keys and values of all ranks, of which rank r has `counts[r]`.

    Dims: images, heads (A), queries (N) or keys (M), channels of a head: of keys (D), of values (E).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BAND: torch.Tensor,
        k_BAMD: torch.Tensor,
        v_BAME: torch.Tensor,
        factor: float,
        counts: list[int],
        ranks: PassingRanks,
    ) -> torch.Tensor:
        wide = torch.promote_types(q_BAND.dtype, torch.float32)
        ctx.factor, ctx.counts, ctx.ranks = factor, counts, ranks
        queries = q_BAND.to(wide) * factor
        most = queries.new_full((*queries.shape[:3], 1), -torch.inf)
        total, made = torch.zeros_like(most), queries.new_zeros(*queries.shape[:3], v_BAME.shape[3])
        with torch.autocast(q_BAND.device.type, enabled=False):
            for keys, values in _passing(k_BAMD, v_BAME, counts, ranks, wide):
                for part in _parts(queries, keys, len(counts)):
                    weights = queries[:, :, part] @ keys.mT
                    higher = torch.maximum(most[:, :, part], weights.amax(3, keepdim=True))
                    weights = weights.sub_(higher).exp_()
                    shrunk = (most[:, :, part] - higher).exp_()
                    total[:, :, part] = total[:, :, part] * shrunk + weights.sum(3, keepdim=True)
                    made[:, :, part] = made[:, :, part] * shrunk + weights @ values
                    most[:, :, part] = higher
        made /= total
        y_BANE = made.to(q_BAND.dtype)
        ctx.save_for_backward(q_BAND, k_BAMD, v_BAME, y_BANE, most + total.log())
        return y_BANE

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BANE: torch.Tensor) -> tuple[Any, ...]:
        q_BAND, k_BAMD, v_BAME, y_BANE, level = ctx.saved_tensors
        wide, own = level.dtype, ctx.ranks.rank
        queries, gradients = q_BAND.to(wide) * ctx.factor, g_BANE.to(wide)
        mean = (gradients * y_BANE).sum(3, keepdim=True)
        dq, dk, dv = torch.zeros_like(queries), None, None
        with torch.autocast(q_BAND.device.type, enabled=False):
            blocks = _passing(k_BAMD, v_BAME, ctx.counts, ctx.ranks, wide)
            for source, (keys, values) in enumerate(blocks):
                of_both = torch.cat([keys, values], 3).zero_()
                of_keys, of_values = of_both.split([keys.shape[3], values.shape[3]], 3)
                for part in _parts(queries, keys, len(ctx.counts)):
                    weights = (queries[:, :, part] @ keys.mT).sub_(level[:, :, part]).exp_()
                    of_values += weights.mT @ gradients[:, :, part]
                    weights *= (gradients[:, :, part] @ values.mT).sub_(mean[:, :, part])
                    dq[:, :, part] += weights @ keys
                    of_keys += weights.mT @ queries[:, :, part]
                summed(of_both, ctx.ranks)
                if source == own:
                    dk, dv = of_keys.to(k_BAMD.dtype), of_values.to(v_BAME.dtype)
        return (dq * ctx.factor).to(q_BAND.dtype), dk, dv, None, None, None


def _passing(
    k_BAMD: torch.Tensor, v_BAME: torch.Tensor, counts: list[int], ranks: PassingRanks, wide: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield keys and values of each rank in turn. Collective over `ranks`."""
    sizes, own = [k_BAMD.shape[3], v_BAME.shape[3]], torch.cat([k_BAMD, v_BAME], 3)
    for source, count in enumerate(counts):
        both = own if source == ranks.rank else own.new_empty(*own.shape[:2], count, own.shape[3])
        ranks.broadcast(both, source)
        keys, values = both.to(wide).split(sizes, 3)
        yield keys, values


def _parts(queries: torch.Tensor, keys: torch.Tensor, ranks: int) -> Iterator[slice]:
    """Yield runs of queries whose weights fit a rank's part of `WEIGHTS_AT_ONCE`."""
    batch, heads, count, _ = queries.shape
    step = max(1, WEIGHTS_AT_ONCE // (ranks * batch * heads * max(1, keys.shape[2])))
    yield from (slice(first, first + step) for first in range(0, count, step))


def gathered(x_BCHW: torch.Tensor, place: BlockPlace, ranks: PassingRanks) -> torch.Tensor:
    """Return the whole image from the blocks of all ranks. Collective over `ranks`, backward too."""
    return _Gathered.apply(place.own_part(x_BCHW), place.row.blocks, place.col.blocks, ranks)


class _Gathered(torch.autograd.Function):
    """The whole image on each rank, by a broadcast of each block. Backward, a sum a block gives its rank the
    gradient."""

    @staticmethod
    def forward(
        ctx: Any, own_BCHW: torch.Tensor, rows: Sequence[Interval], cols: Sequence[Interval], ranks: PassingRanks
    ) -> torch.Tensor:
        ctx.ranks, ctx.parts = ranks, [(row.slice, col.slice) for row in rows for col in cols]
        whole_BCHW = own_BCHW.new_empty(*own_BCHW.shape[:2], rows[-1].stop, cols[-1].stop)
        for source, part in enumerate(ctx.parts):
            block = own_BCHW if source == ranks.rank else whole_BCHW[:, :, *part]
            block = block.contiguous()
            ranks.broadcast(block, source)
            whole_BCHW[:, :, *part] = block
        return whole_BCHW

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[Any, ...]:
        wide = torch.promote_types(g_BCHW.dtype, torch.float32)
        sums = [summed(g_BCHW[:, :, *part].to(wide).contiguous(), ctx.ranks) for part in ctx.parts]
        return sums[ctx.ranks.rank].to(g_BCHW.dtype), None, None, None


class WholeImageProducts(BlockModule):
    """The sum over the image of the outer products of each pixel's channels, in `heads` parts."""

    def __init__(self, layer: ImageProducts) -> None:
        super().__init__(layer)
        self.heads = layer.heads

    def on_block(self, place: BlockPlace, ranks: Any, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        own_BCHW, among = map(place.own_part, inputs_BCHW), None if place.is_whole else ranks
        return _Products.apply(*own_BCHW, inputs_BCHW[0].shape[2:], self.heads, among)


class _Products(torch.autograd.Function):
    """Sums of outer products over ranks, in `size` pixels. Dims: images, heads (A), pixels (N), channels
    of a head (D, E)."""

    @staticmethod
    def forward(
        ctx: Any, a_BCHW: torch.Tensor, b_BCHW: torch.Tensor, size: torch.Size, heads: int, ranks: Ranks | None
    ) -> torch.Tensor:
        ctx.save_for_backward(a_BCHW, b_BCHW)
        ctx.heads, ctx.ranks = heads, ranks
        with torch.autocast(a_BCHW.device.type, enabled=False):
            a_BAND, b_BANE = (_wide(x_BCHW, heads) for x_BCHW in (a_BCHW, b_BCHW))
            sums = summed((a_BAND.mT @ b_BANE).double(), ranks).to(a_BCHW.dtype)
        return sums.flatten(1)[:, :, None, None].expand(-1, -1, *size)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[Any, ...]:
        a_BCHW, b_BCHW = ctx.saved_tensors
        with torch.autocast(g_BCHW.device.type, enabled=False):
            a_BAND, b_BANE = (_wide(x_BCHW, ctx.heads) for x_BCHW in (a_BCHW, b_BCHW))
            sums = summed(g_BCHW.sum((2, 3), dtype=torch.float64), ctx.ranks).to(a_BAND.dtype)
            gradient = sums.view(*a_BAND.shape[:2], a_BAND.shape[3], b_BANE.shape[3])
            da_BCHW = _image(b_BANE @ gradient.mT, a_BCHW).to(a_BCHW.dtype)
            db_BCHW = _image(a_BAND @ gradient, b_BCHW).to(b_BCHW.dtype)
        return da_BCHW, db_BCHW, None, None, None


def _wide(x_BCHW: torch.Tensor, heads: int) -> torch.Tensor:
    return _tokens(x_BCHW, heads).to(torch.promote_types(x_BCHW.dtype, torch.float32))
