"""Handlers of images of several times: (batch, channels, times, height, width), or times among the batch's images.

A tensor of the graph holds times among its channels: all channels of the first time first. So convolutions and norms
over times are layers of images with more channels. Pooling and resizing of times follow those of rows and columns."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tiledseg.geometry.layers.convolutions import OverTimes
from tiledseg.geometry.layers.pixelwise import Layout
from tiledseg.models.layers.pixelwise import COMPUTED, Computed
from tiledseg.models.layers.times import TimesBatchNorm, TimesConvolution, TimesGroupNorm, TimesTransposed
from tiledseg.tracing.calls import Call
from tiledseg.tracing.functions.pixelwise import pixelwise
from tiledseg.tracing.functions.windows import WINDOWS
from tiledseg.tracing.lowering import PERMUTED, Handler, Step, Value, refuse


@dataclass(frozen=True)
class Series:
    """The times and channels of a value. Times have a dim of their own (`has_dim`), or are among the images: `batch`
    holds the atoms of the first dim."""

    layout: Layout
    batch: tuple[str, ...]
    channels: int
    times: int
    has_dim: bool

    @staticmethod
    def of(step: Step, value: Value) -> Series:
        """Return the times and channels of a value. Refuses other layouts."""
        dims, shape, batch = value.layout.dims, value.shape, step.lowering.records[0].batch
        pixels = ((), ()) if value.layout.one_pixel else (("H",), ("W",))
        has_dim = len(dims) == 5 and dims[0] == ("B",)
        refuse(dims[-2:] != pixels or not (has_dim or (len(dims) == 4 and "B" in dims[0])), PERMUTED)
        return Series(value.layout, dims[0], shape[1], shape[2] if has_dim else shape[0] // batch, has_dim)

    def made(self, channels: int, times: int) -> Layout:
        """Return the layout, in the graph's order, of a result with so many channels and times."""
        of_times = ("C0",) * (times > 1)
        of_channels = ("C1" if times > 1 else "C0",) * (channels > 1 or times == 1)
        first = tuple(name for each in self.batch for name in (("B",) if each == "B" else of_times))
        dims = first, of_channels, *((of_times,) if self.has_dim else ()), *self.layout.dims[-2:]
        factors = (times, channels) if of_times and of_channels else ()
        return replace(self.layout, dims=dims, channels=factors)

    def ordered(self, step: Step, value: Value) -> Value:
        """Return the value with its channels in the graph's order, by a node that reorders them if needed."""
        layout = self.made(self.channels, self.times)
        one = step.giving(value.shape, value.other_shape)
        return value if value.layout == layout else pixelwise(one, "contiguous", (value,), {}, layout)[0]


def is_of_times(value: Value) -> bool:
    """Return True if the value has times, in a dim of their own or among the images."""
    dims = value.layout.dims
    return len(dims) == 5 or (len(dims) == 4 and len(dims[0]) == 2 and "B" in dims[0])


OF_ONE_TIME: dict[Any, Any] = {
    nn.Conv2d: TimesConvolution,
    nn.ConvTranspose2d: TimesTransposed,
    nn.BatchNorm2d: TimesBatchNorm,
    nn.GroupNorm: TimesGroupNorm,
    nn.InstanceNorm2d: TimesGroupNorm,
}


def of_one_time(step: Step, module: nn.Module, value: Value, what: str | None = None) -> list[Value]:
    """Lower a module of images, one that is called for each time, or a norm over all times."""
    if not is_of_times(value):
        step.full()
        return step.by(module, value, what, value.layout)
    shuffles = isinstance(module, nn.PixelShuffle | nn.PixelUnshuffle)
    refuse(shuffles, "moves channels of several times at once; call it for each time, or use Upsample")
    known = next((kind for kind in OF_ONE_TIME if isinstance(module, kind)), None)
    if known is None:
        return step.by(module, value, what, value.layout)
    each, kind = Series.of(step, value), OF_ONE_TIME[known]
    made: Any = copy.copy(module)
    made.__class__ = COMPUTED[kind] if isinstance(module, Computed) else kind
    layout = each.made(each.channels, each.times)
    if kind in (TimesBatchNorm, TimesGroupNorm):
        made.times, made.each = each.times, not each.has_dim
        made.num_groups = getattr(module, "num_groups", each.channels)
    else:
        made.times, made.along = OverTimes(each.times, each.times), (1, 0, 1)
        layout = each.made(made.out_channels, each.times)
        made.in_channels, made.out_channels = each.times * made.in_channels, each.times * made.out_channels
    return step.by(made, each.ordered(step, value), what, layout)


def over_times(
    step: Step, kind: type[nn.Module], value: Value, weight: Sequence[int], options: dict[str, Any]
) -> tuple[nn.Module, Layout, Value]:
    """Return the module of conv3d or conv_transpose3d without its weights, the layout of its output, and its input."""
    each, (out, after) = Series.of(step, value), step.call.shapes[0][1:3]
    numbers = {name: number for name, number in options.items() if name != "groups"}
    of = {True: TimesConvolution, False: TimesTransposed}[kind is nn.Conv2d]
    images = {name: number if isinstance(number, str) else _triple(number)[1:] for name, number in numbers.items()}
    sizes = each.times * each.channels, after * out, tuple(weight[3:])
    module: Any = of(*sizes, groups=options["groups"], device="meta", **images)
    module.times = OverTimes(each.times, after, weight[2])
    module.along = tuple(n if isinstance(n, str) else _triple(n)[0] for n in numbers.values())
    return module, each.made(out, after), each.ordered(step, value)


def _triple(number: int | Sequence[int]) -> tuple[Any, ...]:
    """Return a number of each of times, rows and columns."""
    return (number,) * 3 if isinstance(number, int | float) else tuple(number) * (3 // len(number))


_MODES_2D = {"trilinear": "bilinear"}
_POOL = {"kernel_size": None, "stride": None, "padding": 0}
_MAX_POOL = {**_POOL, "dilation": 1, "ceil_mode": False}
_AVG_POOL = {**_POOL, "ceil_mode": False, "count_include_pad": True, "divisor_override": None}


def _over_volume(step: Step) -> list[Value]:
    """Lower a 3d pooling, padding or resizing: a node for rows and columns, then one of single pixels for times."""
    value, name = step.planes(), step.call.function.removesuffix("_with_indices")
    refuse(len(value.shape) != 5, "needs (batch, channels, times, height, width); give it so")
    each, (_, channels, times, *_) = Series.of(step, value), step.call.shapes[0]
    one, other = _of_rows_and_columns(step.call, value.shape), _of_rows_and_columns(step.other, value.other_shape)
    plane = replace(step, call=one, other=other, trained=None)
    made = WINDOWS[plane.call.function](plane)[0]
    besides = [step.made(None, part=part) for part in range(1, len(step.call.shapes))]
    arguments, keywords = _of_times(step, name, times / value.shape[2])
    if arguments is None:
        return [step.made(made.node, made.layout), *besides]
    layout = replace(each, layout=made.layout).made(channels, times)
    return [*pixelwise(step.only(), name, (made, *arguments), keywords, layout), *besides]


def _of_rows_and_columns(call: Call, shape: Sequence[int]) -> Call:
    """Return the 2d call that does to rows and columns what a 3d call does."""

    def cut(number: Any) -> Any:
        if isinstance(number, tuple):
            return number[1:] if len(number) == 3 else number[:4]
        return _MODES_2D.get(number, number) if isinstance(number, str) else number

    name = call.function.removesuffix("_with_indices")
    made = (*shape[:3], *call.shapes[0][3:])
    arguments, keywords = tuple(map(cut, call.arguments)), {key: cut(each) for key, each in call.keywords.items()}
    return replace(call, function=name.replace("3d", "2d"), arguments=arguments, keywords=keywords, shapes=(made,))


def _of_times(step: Step, name: str, factor: float) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """Return the arguments by which a 3d function changes times alone; None if it leaves times as they are."""
    if name in ("max_pool3d", "avg_pool3d"):
        given = step.options(1, **(_MAX_POOL if "max" in name else _AVG_POOL))
        given["stride"] = given["stride"] or given["kernel_size"]
        sizes = {key: _triple(each)[0] for key, each in given.items() if key in _MAX_POOL and key != "ceil_mode"}
        if (sizes["kernel_size"], sizes["stride"], sizes["padding"]) == (1, 1, 0):
            return None, {}
        one: dict[str, Any] = {k: (number, *((0, 0) if k == "padding" else (1, 1))) for k, number in sizes.items()}
        if given.get("divisor_override"):  # by which rows and columns have been divided
            one["divisor_override"] = 1
        return (), {**given, **one}
    if name == "pad":
        pads, mode, fill = step.argument(1, "pad"), step.argument(2, "mode", "constant"), step.argument(3, "value")
        return ((0, 0, 0, 0, *pads[4:]), mode, fill) if any(pads[4:]) else None, {}
    if factor == 1:
        return None, {}
    if name == "interpolate":
        return (), {"scale_factor": (factor, 1.0, 1.0), **step.options(3, mode="nearest", align_corners=None)}
    return ((step.call.shapes[0][2], None, None),), {}


_NAMES = """max_pool3d max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d
adaptive_max_pool3d_with_indices"""
TIMES: dict[str, Handler] = {
    **dict.fromkeys(_NAMES.split(), _over_volume),
    "pad": lambda step: (_over_volume if len(step.value().shape) == 5 else WINDOWS["pad"])(step),
    "interpolate": lambda step: (_over_volume if len(step.value().shape) == 5 else WINDOWS["interpolate"])(step),
}
