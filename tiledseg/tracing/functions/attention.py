"""Handlers of attention over the image: torch's one function, or a product of queries and keys, softmax, and a product
with values, as many authors write it.

Weights of queries and keys are no tensor of the graph: they are written down as `Pairs` until values come.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any, TypeVar

import torch

from tiledseg.geometry.layers.joins import ImageAttention
from tiledseg.models.layers.attention import AttentionOverImage
from tiledseg.tracing.calls import Given, where
from tiledseg.tracing.functions.names import plain
from tiledseg.tracing.functions.views import views_of
from tiledseg.tracing.lowering import Handler, Pairs, RefusalError, Step, UnknownError, Value, refuse

T = TypeVar("T")
TOKENS = ("H", "W")
OTHERWISE = (
    "does with weights of attention what no tile can; scale them by a number, take softmax(dim=-1), times values"
)
POSITIONS = "adds to attention, or masks in it, what has one size of image; leave it away, or map by fixed crops"


def heads_of(value: Value, pixels: int = -2) -> int | None:
    """Return the heads of a tensor whose dim `pixels` (from the end) holds all pixels, and the other of the last two
    the channels of a head, after images and heads; None where it is laid out otherwise."""
    dims, factors = list(value.layout.dims), value.layout.channels
    if len(dims) not in (3, 4) or dims.pop(pixels) != TOKENS or value.layout.one_pixel:
        return None
    last = dims.pop()
    outer = [atom for dim in dims for atom in dim]
    if (outer, last, factors) == (["B"], ("C0",), ()):
        return 1
    return factors[0] if (outer, last) == (["B", "C0"], ("C1",)) and len(factors) == 2 else None


def _attention(step: Step) -> list[Value]:
    """Lower torch's scaled_dot_product_attention."""
    query, key, value = (step.value(index, name) for index, name in enumerate(("query", "key", "value")))
    options = step.options(3, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)
    refuse(options["attn_mask"] is not None or options["is_causal"], POSITIONS)
    refuse(options["dropout_p"] or options["enable_gqa"], OTHERWISE)
    scale = options["scale"]
    return _attend(step, query, key, value, 1 / sqrt(query.shape[-1]) if scale is None else float(scale))


def _attend(step: Step, query: Value, key: Value, value: Value, scale: float, turned: bool = False) -> list[Value]:
    """Add the node of attention; every one is seen as (images, heads, pixels, channels of a head). `turned`: the
    result is seen with pixels last."""
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
    return step.node("attention", rows, module, (query, key, value), layout, cols=cols)


def _product(step: Step) -> list[Value]:
    """Note a product of queries and keys."""
    query, key = (step.value(index, name) for index, name in enumerate(("input", "other")))
    refuse(heads_of(query) != heads_of(key, -1), OTHERWISE)
    return [replace(step.made(None), pairs=Pairs(query, _turned(key)))]


def _turned(value: Value) -> Value:
    """Return the tensor as its author would see it with the last two dims exchanged."""
    layout = replace(value.layout, dims=_exchanged(value.layout.dims))
    return replace(value, layout=layout, shape=_exchanged(value.shape), other_shape=_exchanged(value.other_shape))


def _exchanged(dims: tuple[T, ...]) -> tuple[T, ...]:
    """Return dims, or their sizes, with the last two exchanged."""
    return *dims[:-2], dims[-1], dims[-2]


def with_pairs(step: Step) -> Handler | None:
    """Return the handler of a call that takes weights of queries and keys, or makes them; None for any other."""
    given = [step.lowering.resolved(each) for each in (*step.call.arguments, *step.call.keywords.values())]
    if any(isinstance(each, Value) and each.pairs for each in given):
        return _weigh
    values = [each for each in given[:2] if isinstance(each, Value) and each.node]
    several = len(values) == 2 and plain(step.call.function) in PRODUCTS
    return _product if several and heads_of(values[0]) and heads_of(values[1], -1) else None


def _weigh(step: Step) -> list[Value]:
    """Lower what is done with weights of queries and keys."""
    name, (first, *rest) = plain(step.call.function), step.given()[0]
    pairs: Any = next(each.pairs for each in (first, *rest) if isinstance(each, Value) and each.pairs)
    refuse(any(isinstance(each, Given) for each in (first, *rest)), POSITIONS)
    refuse(name in ("mul", "div") and step.call.keywords, OTHERWISE)
    number = next((each for each in (first, *rest) if isinstance(each, int | float)), None)
    if name == "mul" and number is not None and not pairs.softmaxed:
        return _noted(step, replace(pairs, scale=pairs.scale * number))
    if name == "div" and number is not None and number is not first and not pairs.softmaxed:
        return _noted(step, replace(pairs, scale=pairs.scale / number))
    if name == "softmax" and not pairs.softmaxed:
        cast = any(isinstance(each, torch.dtype) for each in (*rest, *step.call.keywords.values()))
        refuse(step.argument(1, "dim") not in (-1, len(first.shape) - 1) or pairs.turned or cast, OTHERWISE)
        return _noted(step, replace(pairs, softmaxed=True))
    if name == "dropout":
        refuse(step.argument(2, "training", True), "drops in evaluation too; pass training=self.training")
        if step.argument(1, "p", 0.5):
            why = f"{where(step.call)} drops weights of attention in training"
            step.lowering.untrained = step.lowering.untrained or why
        return _noted(step, pairs)
    if name in ("contiguous", "clone", "to", "type_as"):
        return _noted(step, pairs) if first.pairs else step.passed(first)
    if name in ("transpose", "permute", "swapaxes"):
        last = len(first.shape) - 1
        ((_, order),) = views_of(step, step.call, first.shape)
        refuse(order != [*range(last - 1), last, last - 1], OTHERWISE)
        return _noted(step, replace(pairs, turned=not pairs.turned))
    value = first if pairs.turned else (*rest, None)[0]
    if name in PRODUCTS and pairs.softmaxed and len(rest) == 1 and isinstance(value, Value) and not value.pairs:
        if value.node is None:
            raise UnknownError
        value = _turned(value) if pairs.turned else value
        return _attend(step, pairs.query, pairs.key, value, pairs.scale, pairs.turned)
    raise RefusalError(OTHERWISE)


def _noted(step: Step, pairs: Pairs) -> list[Value]:
    return [replace(step.made(None), pairs=pairs)]


PRODUCTS = ("matmul", "__matmul__", "bmm")
ATTENDING: dict[str, Handler] = {"scaled_dot_product_attention": _attention}
