"""The table of handlers, one for each function of torch that a graph can hold; and the handler of units."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from tiledseg.geometry.layers.joins import Add, Concatenate, Multiply
from tiledseg.geometry.layers.pixelwise import Dropout
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.layers.joins import JoinModule
from tiledseg.spatial.twins import POINTWISE
from tiledseg.tracing.calls import ALONG_CHANNELS, ELEMENTWISE, REASONS, UNKNOWN, Given, plain, values_in, where
from tiledseg.tracing.declared import declaration, depth_rate
from tiledseg.tracing.functions.attention import ATTENDING, with_pairs
from tiledseg.tracing.functions.leaves import declared_leaf
from tiledseg.tracing.functions.pixelwise import PIXELS, VIEWS, channel_dims, common_layout, pixelwise, resized_channels
from tiledseg.tracing.functions.times import TIMES, of_one_time
from tiledseg.tracing.functions.weighted import WEIGHTED, called, corrected
from tiledseg.tracing.functions.windows import WINDOWS
from tiledseg.tracing.lowering import ONE_PIXEL, WHOLE, Handler, RefusalError, Step, UnknownError, Value, refuse
from tiledseg.tracing.positions import positioned

# The place of the argument `inplace` of activations.
INPLACE = {"relu": 1, "relu6": 1, "selu": 1, "silu": 1, "mish": 1, "hardswish": 1, "hardsigmoid": 1}
INPLACE |= {"leaky_relu": 2, "elu": 2, "celu": 2, "hardtanh": 3, "threshold": 3}
# The place of the argument `dim` of further functions along channels.
DIM_PLACES = {"topk": 2, "roll": 2, "diff": 2, "repeat_interleave": 2, "take_along_dim": 2}
DIM_PLACES |= dict.fromkeys(("gather", "index_select", "cumprod", "logcumsumexp"), 1)
OF_IMAGES = ("channel_shuffle", "native_channel_shuffle", "local_response_norm")  # along dim 1


def lowered(step: Step) -> list[Value]:
    """Lower a call by the handler of its function. Raises RefusalError for an unknown function, and UnknownError for a
    call that takes the result of a refused call."""
    return _handled(positioned(step, _handled))


def _handled(step: Step) -> list[Value]:
    name = plain(step.call.function)
    handler = _unit if step.call.module is not None else with_pairs(step) or HANDLERS.get(name)
    if handler is None:
        raise RefusalError(REASONS.get(step.call.function, UNKNOWN))
    given = map(step.lowering.resolved, values_in((step.call.arguments, dict(step.call.keywords))))
    if any(isinstance(each, Value) and not each.node and not each.pairs for each in given):
        raise UnknownError("takes places of maxima, or a like second result; take the maxima alone, the first result")
    return handler(step)


def _elementwise(step: Step) -> list[Value]:
    name = plain(step.call.function)
    places = name == "where" and len(step.call.arguments) + len(step.call.keywords) == 1
    refuse(places, "reads places from the values of a tensor; choose by torch.where(truths, this, that)")
    arguments, keywords = step.given()
    keywords.pop("inplace", None)
    refuse(keywords.pop("out", None) is not None, "writes into the tensor `out`; leave out the argument")
    join = {"add": Add, "mul": Multiply}.get(name) if len(arguments) == 2 and not keywords else None
    if join and all(getattr(each, "layout", None) == WHOLE for each in arguments):
        one, other = arguments
        if one.shape == other.shape and one != other:
            return step.node(name, JoinModule(join()), arguments)
    return pixelwise(step, step.as_called(name), arguments[: INPLACE.get(name, len(arguments))], keywords)


def _same(step: Step) -> list[Value]:
    """Lower a change of dtype or memory alone. Booleans become numbers of the network's dtype."""
    value = step.value(0, "self")
    source = value.node
    while source in step.lowering.truths:
        source = step.lowering.truths[source]
    if source == value.node or plain(step.call.function) in ("contiguous", "clone", "alias", "cpu", "cuda"):
        return step.passed(value)
    return pixelwise(step, "type_as", (value, replace(value, node=source)), {})


def _cat(step: Step) -> list[Value]:
    """Lower a join: along channels, or of tensors of one layout along a dim of size 1."""
    given, dim = step.arguments(0, "tensors")[0], step.argument(1, "dim", 0)
    inputs = [each for each in given if isinstance(each, Value) or each.tensor.numel()]
    constant = not all(isinstance(value, Value) for value in inputs)
    refuse(constant, "joins a tensor that does not depend on the input; compute it from the input, or leave it out")
    what, dim, layout = "cat", dim % len(inputs[0].shape), inputs[0].layout
    if layout.dims[dim] == () and all(value.layout == layout for value in inputs):
        split = layout.channels or ("C0",) not in layout.dims
        refuse(split, "joins tensors whose channels are split, or none; join images")
        what, factors = "stack", (len(inputs), step.call.shapes[0][layout.dims.index(("C0",))])
        dims = [tuple("C1" if atom == "C0" else atom for atom in each) for each in layout.dims]
        dims[dim] = ("C0",)
        layout = replace(layout, dims=tuple(dims), channels=factors)
    else:
        for value in inputs:
            channel_dims(value, dim)
        if not all(value.layout == WHOLE for value in inputs):
            layout = resized_channels(common_layout(inputs), dim, step.call.shapes[0][dim])
            return pixelwise(step, "cat", (tuple(inputs),), {"dim": dim}, layout)
        if len(inputs) == 1:
            return step.passed(inputs[0])
    return step.node(what, JoinModule(Concatenate((0,) * len(inputs))), inputs, layout)


def _stack(step: Step) -> list[Value]:
    """Lower a stack: the tensors' channels one after the other, with a new dim for the tensors."""
    inputs, dim = step.argument(0, "tensors"), step.argument(1, "dim", 0)
    alike = all(isinstance(value, Value) and value.layout == inputs[0].layout for value in inputs)
    refuse(not alike, "stacks tensors of different layouts, or that do not depend on the input; stack images")
    return [step.do("cat", tuple(step.do("unsqueeze", value, dim) for value in inputs), dim)]


def _along_channels(step: Step) -> list[Value]:
    """Lower a function along channels, such as softmax; the number of channels may change."""
    name = plain(step.call.function)
    if name == "layer_norm":
        dim: Any = tuple(range(-len(step.argument(1, "normalized_shape")), 0))
    else:
        dim = 1 if name in OF_IMAGES else step.argument(DIM_PLACES.get(name, 1), "dim")
    refuse(dim is None, "has no dim; give dim=1")
    channel_dims(step.value(), dim, REASONS.get(name))
    return called(step, name)


def _normalize(step: Step) -> list[Value]:
    """Lower a division of channels by their lengths: of each pixel, or over the image."""
    value, dim, p = step.value(), step.argument(2, "dim", 1), step.argument(1, "p", 2.0)
    if not isinstance(dim, int) or value.layout.dims[dim] != PIXELS or value.layout.one_pixel or p != 2:
        channel_dims(value, dim)
        return called(step, "normalize")
    length = step.do("norm", value, p, dim, True)
    return [step.do("div", value, step.do("clamp_min", length, step.argument(3, "eps", 1e-12)))]


def _dropout(step: Step) -> list[Value]:
    name, probability = plain(step.call.function), step.argument(1, "p", 0.5)
    value, flag = step.value(), "train" if name == "feature_dropout" else "training"
    of_channels = name == "dropout" or (name in ("dropout2d", "dropout3d", "feature_dropout") and len(value.shape) < 5)
    refuse(probability and not of_channels, "drops other values than channels; use Dropout2d, or Dropout for times")
    refuse(step.argument(2, flag, True), "drops in evaluation too; pass training=self.training")
    if name == "dropout3d" and probability:
        step.lowering.untrained = f"{where(step.call)} drops other things than channels of an image; use Dropout2d"
    return _dropped(step, probability)


def _dropped(step: Step, probability: float, of_images: bool = False) -> list[Value]:
    value = step.value()
    if probability == 0:
        return step.passed(value)
    if of_images and value.layout.dims[0] != ("B",):
        why = f"{where(step.call)} drops along another dim than that of images"
        step.lowering.untrained = step.lowering.untrained or why
        return step.passed(value)
    module = ChannelDropout("", probability, of_images)
    module.keys = ()
    module.name = step.lowering.add(step, "dropout", module, (value,), Dropout(probability, of_images))
    return [step.made(module.name, value.layout)]


def _unit(step: Step) -> list[Value]:
    """Lower a call of a unit: stochastic depth, a declared module, or a layer with a twin."""
    module = step.call.module
    assert module is not None, "a unit is a module's call"
    refuse(module._forward_hooks or module._forward_pre_hooks, "has hooks, which a tile would run too; remove them")
    if (rate := depth_rate(module)) is not None:
        return _dropped(step, rate, of_images=True)
    if found := declaration(module):
        return declared_leaf(step, found)
    value = step.value()
    if isinstance(module, nn.PReLU) and module.num_parameters > 1 and value.layout not in (WHOLE, ONE_PIXEL):
        return pixelwise(step, "prelu", (value, Given(module.weight, "weight", True)), {}, broadcasts=False)
    more = len(step.call.arguments) + len(step.call.keywords) > 1
    refuse(more, "takes more than one tensor; give the rest, such as output_padding, to its constructor")
    if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
        value = step.do("pad", value, tuple(module._reversed_padding_repeated_twice), module.padding_mode)
        module = copy.copy(module)
        module.padding, module.padding_mode = (0, 0), "zeros"
    if type(module) in POINTWISE:
        return step.by(corrected(module), value, None, value.layout)
    return of_one_time(step, corrected(module), value)


_SAME = "contiguous clone to float double half type type_as alias as_tensor asarray cpu cuda"
_REVERSED = "__rdiv__ __rsub__ __rpow__ __radd__ __rmul__"
_DROPOUTS = "dropout dropout2d feature_dropout dropout1d dropout3d alpha_dropout feature_alpha_dropout"
HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(_SAME.split(), _same),
    **dict.fromkeys((*ELEMENTWISE, *_REVERSED.split()), _elementwise),
    **WINDOWS,
    **WEIGHTED,
    **ATTENDING,
    **VIEWS,
    **TIMES,
    "cat": _cat,
    "stack": _stack,
    **dict.fromkeys((*ALONG_CHANNELS, *DIM_PLACES, *OF_IMAGES, "layer_norm"), _along_channels),
    "normalize": _normalize,
    **dict.fromkeys(_DROPOUTS.split(), _dropout),
}
