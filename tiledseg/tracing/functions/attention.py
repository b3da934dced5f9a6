"""Handlers of attention over the image: of torch's functions, or of a product of queries and keys, softmax, and a
product with values. Weights of attention are no tensor of the graph: `Pairs` stand for them until that product."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any, TypeVar

import torch

from tiledseg.geometry.layers.joins import ImageAttention, ImageProducts
from tiledseg.geometry.layers.pixelwise import Layout
from tiledseg.models.layers.attention import AttentionOverImage, WholeImageProducts
from tiledseg.tracing.calls import Given, plain, where
from tiledseg.tracing.functions.pixelwise import PIXELS, pixelwise, resized_channels, views_of
from tiledseg.tracing.lowering import Handler, Pairs, RefusalError, Step, Value, is_channels, refuse

T = TypeVar("T")
OTHERWISE = "does with weights of attention what no tile can; scale them before softmax(dim=-1), and multiply by values"
MATRIX = "multiplies pixels by numbers of the image that are no matrix of channels a head; give one to each head"
_BUT = "mix channels, or write attention by matmul, softmax(dim=-1), matmul, or scaled_dot_product_attention"
OVER_PIXELS = f"sums over pixels, or joins each with each, of which a tile has a part only; {_BUT}"
POSITIONS = "joins weights of attention with a tensor, as of positions; drop it, or map by fixed crops (--window)"


def heads_of(value: Value, pixels: int = -2) -> int | None:
    """Return the number of heads of (images, heads, pixels, channels), or of (images, heads, channels, pixels) if
    `pixels` is -1; None for another layout."""
    dims, factors = list(value.layout.dims), value.layout.channels
    if len(dims) not in (3, 4) or dims.pop(pixels) != PIXELS or value.layout.one_pixel:
        return None
    last = dims.pop()
    outer = [atom for dim in dims for atom in dim]
    if (outer, last, factors) == (["B"], ("C0",), ()):
        return 1
    return factors[0] if (outer, last) == (["B", "C0"], ("C1",)) and len(factors) == 2 else None


def _attention(step: Step) -> list[Value]:
    """Lower torch's scaled_dot_product_attention."""
    query, key, value = (step.value(index, name) for index, name in enumerate(("query", "key", "value")))
    refuse(step.arguments(3, "attn_mask") != [None, None] or step.argument(5, "is_causal"), POSITIONS)
    options = step.options(4, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)
    refuse(options["dropout_p"] or options["enable_gqa"], OTHERWISE)
    scale, layouts = options["scale"], [each.layout for each in (query, key, value)]
    outer = {(layout.dims[:-2], each.shape[:-2]) for layout, each in zip(layouts, (query, key, value), strict=True)}
    if len(outer) == 1 and all(is_channels(dim) for layout in layouts for dim in layout.dims[-2:]):  # inside a pixel
        layout = resized_channels(query.layout, len(query.shape) - 1, value.shape[-1])
        return pixelwise(step, "scaled_dot_product_attention", *step.given(), layout, broadcasts=False)
    return _attend(step, query, key, value, 1 / sqrt(query.shape[-1]) if scale is None else float(scale))


def _multi_head(step: Step) -> list[Value]:
    """Lower the result of nn.MultiheadAttention, whose calls have been recorded: its weights have no node."""
    value = step.value()
    unseen = replace(step.made(None, part=1), pairs=Pairs(value, value, softmaxed=True))
    return [*step.only().passed(value), unseen]


def _attend(step: Step, query: Value, key: Value, value: Value, scale: float, turned: bool = False) -> list[Value]:
    """Add a node of attention for tensors (images, heads, pixels, channels). `turned`: the result has pixels last."""
    heads = [heads_of(each) for each in (query, key, value)]
    what = f"attends in tensors of {query.shape}, {key.shape} and {value.shape}"
    refuse(None in heads or len(set(heads)) > 1, f"{what}; give (batch, heads, pixels, channels) of all pixels")
    sizes = [step.lowering.pixels[str(each.node)] for each in (query, key, value)]
    refuse(sizes[1] != sizes[2], f"{what}, keys and values of other pixels; give them the same")
    ratios = {(q[0] / k[0], q[1] / k[1]) for q, k in zip(*sizes[:2], strict=True)}
    uneven = len(ratios) > 1 or any(ratio != int(ratio) for ratio in next(iter(ratios)))
    refuse(uneven, f"{what}: keys are no whole number of times smaller at every size; reduce them by fixed strides")
    rows, cols = (ImageAttention(int(heads[0] or 1), int(ratio), scale) for ratio in ratios.pop())
    module = AttentionOverImage(rows, cols)
    layout = query.layout if heads[0] == 1 else replace(query.layout, channels=(int(heads[0] or 1), value.shape[-1]))
    layout = replace(layout, dims=_exchanged(layout.dims)) if turned else layout
    return step.node("attention", module, (query, key, value), layout)


def _product(step: Step) -> list[Value]:
    """Note a product of queries and keys as `Pairs`."""
    query, key = (step.value(index, name) for index, name in enumerate(("input", "other")))
    refuse(heads_of(query) != heads_of(key, -1), OTHERWISE)
    return [replace(step.made(None), pairs=Pairs(query, _transposed(key)))]


def _products(step: Step) -> list[Value]:
    """Lower a product over all pixels, as in linear attention: a matrix for each head of an image."""
    one, other = (step.value(index, name) for index, name in enumerate(("input", "other")))
    refuse(step.lowering.pixels[str(one.node)] != step.lowering.pixels[str(other.node)], OTHERWISE)
    sizes = one.shape[-2], other.shape[-1]
    heads = heads_of(other) or 1
    of_heads = (("C0",),) * (len(one.shape) == 4)
    split = (heads, *sizes)[-2 - len(of_heads) :]
    last = [(f"C{len(of_heads) + k}",) for k in range(2)]
    layer = ImageProducts(heads=heads, out_channels=heads * sizes[0] * sizes[1])
    layout = Layout((("B",), *of_heads, *last), split, one_pixel=True)
    return step.node("products", WholeImageProducts(layer), (one, other), layout)


def of_channels(step: Step, one: Value, other: Value) -> list[Value]:
    """Lower a matrix product over channels: of two tensors of each pixel, or of pixels with a matrix of the image."""
    dims, (row, *inner, col) = one.layout.dims[:-2], (*one.layout.dims[-2:], *other.layout.dims[-2:])
    flat = one.layout.one_pixel, other.layout.one_pixel
    alike = (dims, one.shape[:-2]) == (other.layout.dims[:-2], other.shape[:-2]) and all(map(is_channels, inner))
    fits = (is_channels(row) or flat == (False, True)) and (is_channels(col) or flat == (True, False))
    refuse(not alike or not fits, OVER_PIXELS if flat[0] == flat[1] else MATRIX)
    atoms = [atom for dim in dims for atom in dim if is_channels((atom,))]
    names = {atom: f"C{at}" for at, atom in enumerate(atoms)}
    factors = [one.layout.channels[int(atom[1:])] for atom in atoms]
    made = [tuple(names.get(atom, atom) for atom in dim) for dim in dims]
    for dim, size in zip((row, col), step.call.shapes[0][-2:], strict=True):
        made.append((f"C{len(factors)}",) if is_channels(dim) else dim)
        factors += [size] if is_channels(dim) else []
    layout = Layout(tuple(made), tuple(factors) if len(factors) > 1 else (), all(flat))
    return pixelwise(step, step.as_called("matmul"), (one, other), {}, layout, broadcasts=False)


def _transposed(value: Value) -> Value:
    """Return the value with the last two dims of its layout exchanged."""
    layout = replace(value.layout, dims=_exchanged(value.layout.dims))
    return replace(value, layout=layout, shape=_exchanged(value.shape), other_shape=_exchanged(value.other_shape))


def _exchanged(dims: tuple[T, ...]) -> tuple[T, ...]:
    """Return dims, or their sizes, with the last two exchanged."""
    return *dims[:-2], dims[-1], dims[-2]


def with_pairs(step: Step) -> Handler | None:
    """Return the handler of a call that takes or makes weights of attention or matrices of an image, or None."""
    given = [step.lowering.resolved(each) for each in (*step.call.arguments, *step.call.keywords.values())]
    if any(isinstance(each, Value) and each.pairs for each in given):
        return _weigh
    values = [each for each in given[:2] if isinstance(each, Value) and each.node]
    if len(values) != 2 or plain(step.call.function) not in PRODUCTS:
        return None
    if heads_of(values[0]) and heads_of(values[1], -1):
        return _product
    of_pixels = [heads_of(values[0], -1), heads_of(values[1])]
    return _products if all(of_pixels) and of_pixels[0] == of_pixels[1] else None


def _weigh(step: Step) -> list[Value]:
    """Lower a call that takes weights of attention: scaling, softmax, dropout, transposition, product with values."""
    name, (first, *rest) = plain(step.call.function), step.given()[0]
    pairs: Any = next(each.pairs for each in (first, *rest) if isinstance(each, Value) and each.pairs)
    factor: Any = next((each for each in (first, *rest) if isinstance(each, Given | int | float)), None)
    scales = name == "mul" or (name == "div" and factor is not first)
    if scales and isinstance(factor, Given) and not factor.from_weights and factor.tensor.numel() == 1:
        factor = factor.tensor.item()
    refuse(isinstance(factor, Given), POSITIONS)
    if scales and factor is not None:
        refuse(step.call.keywords or pairs.softmaxed, OTHERWISE)
        return _paired(step, replace(pairs, scale=pairs.scale * factor if name == "mul" else pairs.scale / factor))
    if name == "softmax" and not pairs.softmaxed:
        cast = any(isinstance(each, torch.dtype) for each in (*rest, *step.call.keywords.values()))
        refuse(step.argument(1, "dim") not in (-1, len(first.shape) - 1) or pairs.turned or cast, OTHERWISE)
        return _paired(step, replace(pairs, softmaxed=True))
    if name == "dropout":
        refuse(step.argument(2, "training", True), "drops in evaluation too; pass training=self.training")
        if step.argument(1, "p", 0.5):
            why = f"{where(step.call)} drops weights of attention in training"
            step.lowering.untrained = step.lowering.untrained or why
        return _paired(step, pairs)
    if name in ("contiguous", "clone", "to", "type_as"):
        return _paired(step, pairs) if first.pairs else step.passed(first)
    if name in ("transpose", "permute", "swapaxes"):
        last = len(first.shape) - 1
        ((_, order),) = views_of(step, step.call, first.shape)
        refuse(order != [*range(last - 1), last, last - 1], OTHERWISE)
        return _paired(step, replace(pairs, turned=not pairs.turned))
    value = first if pairs.turned else (*rest, None)[0]
    if name in PRODUCTS and pairs.softmaxed and len(rest) == 1 and isinstance(value, Value) and not value.pairs:
        value = _transposed(value) if pairs.turned else value
        return _attend(step, pairs.query, pairs.key, value, pairs.scale, pairs.turned)
    raise RefusalError(OTHERWISE)


def _paired(step: Step, pairs: Pairs) -> list[Value]:
    return [replace(step.made(None), pairs=pairs)]


PRODUCTS = ("matmul", "__matmul__", "bmm")
ATTENDING: dict[str, Handler] = {
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": _multi_head,
}
