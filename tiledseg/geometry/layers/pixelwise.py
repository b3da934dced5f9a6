"""Pixelwise layers: norms, activations, and any torch function, called in its author's layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tiledseg.geometry.layers.layer import Layer, LayerCounts, LayerMemory, Shape
from tiledseg.units import DOUBLE_BYTES, SINGLE_NORMS, norm_work_bytes, wide_bytes

# Functions whose output has no gradient; truth values take one byte each.
TRUTHS = frozenset(
    ["eq", "ne", "lt", "le", "gt", "ge", "isnan", "isfinite", "logical_and", "logical_or", "logical_not", "logical_xor"]
)
CONSTANT = TRUTHS | {"detach"}
# Memory of functions, by a rule that plans 0 to 30 % too much for published networks: autograd keeps nothing of
# KEEPS_NOTHING, one tensor more of COMPOSED (several steps), and the inputs of all others.
_KEEPS_NOTHING = "add sub rsub neg cat contiguous pad expand mean sum type_as"
KEEPS_NOTHING = CONSTANT | frozenset(_KEEPS_NOTHING.split())
COMPOSED = frozenset(("softmin", "normalize", "layer_norm", "glu"))


@dataclass(frozen=True)
class FormulaSlot:
    """The place of a tensor among a call's arguments: input `index` of the node, or weight `index` of the layer."""

    index: int
    is_weight: bool = False


@dataclass(frozen=True)
class Formula:
    """A tensor computed from weights at each call; `part`: which of the function's results, if it returns several."""

    function: str
    arguments: tuple[object, ...]
    keywords: tuple[tuple[str, object], ...] = ()
    part: int | None = None


@dataclass(frozen=True)
class Cut:
    """A slice, as a value."""

    start: int | None
    stop: int | None
    step: int | None


@dataclass(frozen=True)
class Layout:
    """The dims in which a function gets a tensor of (batch, channels, height, width).

    They are `B`, `C`, `H`, `W`, each once, in any order; several in one tuple are one dim (`B HW C`: tokens).
    `channels`: the factors of C if it is split; the dims are then `C0`, `C1`. `one_pixel`: all pixels are the same, and
    H and W are 1 or left out.
    """

    dims: tuple[tuple[str, ...], ...] = (("B",), ("C0",), ("H",), ("W",))
    channels: tuple[int, ...] = ()
    one_pixel: bool = False


@dataclass(frozen=True)
class Pixelwise(Layer):
    """A pointwise torch `function`, called with `arguments` and `keywords`, in which a `FormulaSlot` stands for a
    tensor.

    It has `out_channels`, and weights of the shapes `weights`. `before`: the layouts of its inputs; `after`: that of
    its output.
    """

    function: str
    arguments: tuple[object, ...]
    out_channels: int
    keywords: tuple[tuple[str, object], ...] = ()
    before: tuple[Layout, ...] = (Layout(),)
    after: Layout = field(default_factory=Layout)
    weights: tuple[tuple[int, ...], ...] = ()
    part: int | None = None  # of a function that returns several tensors

    protects_output = True  # it may be a view, flat, or needed by the backward pass

    @property
    def arity(self) -> int:
        return len(self.before)

    def counts(self, channels: int) -> LayerCounts:
        return LayerCounts(sum(math.prod(shape) for shape in self.weights))

    @property
    def gradient(self) -> str:
        return "none" if self._name in CONSTANT else "new"

    @property
    def gives_in(self) -> str:
        return "byte" if self._name in TRUTHS else "run" if self._name == "type_as" else "same"

    @property
    def _name(self) -> str:
        return self.function.removeprefix("Tensor.")

    @property
    def kept_inputs(self) -> tuple[int, ...]:
        return () if self._name in KEEPS_NOTHING else tuple(range(self.arity))

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        return LayerMemory(kept=width * math.prod(shape) * (self._name in COMPOSED), transient=2 * max(inputs))

    @property
    def is_cheap(self) -> bool:
        return not self.weights


@dataclass(frozen=True)
class Positions(Layer):
    """A tensor of `out_channels` computed only from the size of the whole image, which its input tells, with at most
    `whole_values` values a pixel in memory."""

    out_channels: int
    whole_values: int = 0

    asks_place = True
    protects_output = True  # all images share one tensor
    gradient = "none"


@dataclass(frozen=True)
class OfOnePixel(Layer):
    """A layer with `weights` weights on a tensor whose pixels are all the same: computed for one pixel."""

    out_channels: int
    weights: int = 0

    protects_output = True
    is_flat = True
    kept_inputs = (0,)


@dataclass(frozen=True)
class ZeroAtZero(Layer):
    """A function of single values that is zero at zero."""

    keeps_zero = True
    kept_inputs = (0,)

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        return LayerMemory(transient=max(inputs))  # PReLU's gradient of its slope, before it is summed


@dataclass(frozen=True)
class Mark(Layer):
    """The identity: names a tensor that a later layer reads."""

    keeps_zero = True
    hands_on = True
    gradient = "same"


@dataclass(frozen=True)
class Dropout(Layer):
    """Dropout of whole channels with `probability` (more than 0), the same over the whole image; `of_images`: of all
    channels at once."""

    probability: float
    of_images: bool = False

    keeps_zero = True
    gives_in = "run"

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        return LayerMemory(kept=width * (1 if self.of_images else shape[0]))  # a factor for each draw


@dataclass(frozen=True)
class Activation(Layer):
    """Leaky ReLU, or another activation that is zero at zero."""

    negative_slope: float = 0.01

    keeps_zero = True
    overwrites = True
    kept_inputs = (0,)


@dataclass(frozen=True)
class Sigmoid(Layer):
    """1 / (1 + exp(-x)), for gates."""

    keeps_output = True


@dataclass(frozen=True)
class Norm(Layer):
    """A norm of `kind` pixel (channels of each pixel), instance, group or batch.

    `affine`: it has weights. `running`: a batch norm has running statistics; `still`: these are constant, also in
    training. `times`: a channel's weight serves this many times.
    """

    kind: str
    groups: int = 1
    affine: bool = True
    running: bool = True
    still: bool = False
    times: int = 1

    kept_inputs = (0,)

    def counts(self, channels: int) -> LayerCounts:
        return LayerCounts(2 * channels // self.times if self.affine else 0)

    @property
    def statistics(self) -> str | None:
        return None if self.still else {"instance": "image", "group": "image", "batch": "batch"}.get(self.kind)

    @property
    def tracks(self) -> bool:
        return self.kind == "batch" and self.running and not self.still

    @property
    def is_still(self) -> bool:
        return self.still

    def in_words(self, module: str | None) -> str:
        return f"model.norm is {self.kind}" if module is None else f"'{module}' is a norm of kind {self.kind}"

    def statistic_sets(self, channels: int) -> int:
        return self.groups if self.kind == "group" else channels // self.times

    def shared_values(self, channels: int, ranks: int) -> tuple[int, int]:
        """Count the count, means and variances in a slot for each rank; backward gradients of mean and deviation."""
        sets = self.statistic_sets(channels)
        return ((1 + 2 * sets) * ranks, 2 * sets) if self.statistics else (0, 0)

    @property
    def returns_view(self) -> bool:
        return self.kind == "pixel"  # computed in another layout

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        """Count statistics, unless they are constant. Pixel norm has a mean and a deviation a pixel. Others have, in
        float64, a scale a channel, a mean and a deviation a set, and the count."""
        channels, height, columns = shape
        kept = DOUBLE_BYTES * (channels + 2 * self.statistic_sets(channels) + 1)
        if self.kind == "pixel":
            kept = 2 * height * columns * wide_bytes(width)
        # Rows copied for sums are freed before the gradient is made.
        gradient = max(inputs[0], norm_work_bytes(*shape)) if self.statistics else None
        return LayerMemory(kept=0 if self.still else kept, gradient=gradient)

    @property
    def computes_in(self) -> str:
        return "wide" if self.kind in SINGLE_NORMS else "run"

    gives_in = computes_in


def stilled(layer: Layer) -> Layer:
    """Return the layer with constant running statistics."""
    return replace(layer, still=True) if isinstance(layer, Norm) and layer.tracks else layer


def norm_or_mark(kind: str, groups: int = 1) -> Layer:
    """Return the norm of a kind, or for `none` the identity: a network then has as many nodes."""
    return Mark() if kind == "none" else Norm(kind, groups)
