"""Layers of single pixels: norms, activations, and any function of torch's, called in the layout of its author."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tiledseg.geometry.layers.layer import Layer, Shape
from tiledseg.units import DOUBLE_BYTES, norm_bytes, norm_work_bytes

# Functions whose output nothing is differentiated through; truths take one byte each.
TRUTHS = frozenset(
    ["eq", "ne", "lt", "le", "gt", "ge", "isnan", "isfinite", "logical_and", "logical_or", "logical_not", "logical_xor"]
)
CONSTANT = TRUTHS | {"detach"}
# Memory of functions, by a rule that plans 0 to 30 % too much for published networks: those of which autograd keeps
# nothing, those of several steps, which keep a tensor more; all others keep their inputs.
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
    """A tensor computed from weights alone, each time anew; `part` of what the function gives, if that is several."""

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
    """The dims in which a function sees a tensor of (batch, channels, height, width).

    They are `B`, `C`, `H`, `W`, each once, in any order; neighbours in one word are one dim (`B HW C`: tokens).
    `channels`: the factors of C, where it has been split; the dims are then `C0`, `C1`. `one_pixel`: all pixels are the
    same, and H and W are 1, or left out.
    """

    dims: tuple[tuple[str, ...], ...] = (("B",), ("C0",), ("H",), ("W",))
    channels: tuple[int, ...] = ()
    one_pixel: bool = False


@dataclass(frozen=True)
class Pixelwise(Layer):
    """`function` of torch, called with `arguments` and `keywords`, in which a `FormulaSlot` stands for a tensor.

    Each pixel of its output depends on that pixel of its inputs alone. It gives `out_channels`, and has weights of the
    shapes `weights`. `before` are the layouts of its inputs, `after` that of its output.
    """

    function: str
    arguments: tuple[object, ...]
    out_channels: int
    keywords: tuple[tuple[str, object], ...] = ()
    before: tuple[Layout, ...] = (Layout(),)
    after: Layout = field(default_factory=Layout)
    weights: tuple[tuple[int, ...], ...] = ()
    part: int | None = None  # of a function that gives several tensors

    protects_output = (
        True  # a view, or all pixels one in memory, or needed by the backward pass: only the function knows
    )

    @property
    def arity(self) -> int:
        return len(self.before)

    def parameters(self, channels: int) -> int:
        return sum(math.prod(shape) for shape in self.weights)

    @property
    def gradient(self) -> str:
        return "none" if self._name in CONSTANT else "new"

    def output_width(self, at_hand: int, width: int) -> int:
        return 1 if self._name in TRUTHS else width if self._name == "type_as" else at_hand

    @property
    def _name(self) -> str:
        return self.function.removeprefix("Tensor.")

    @property
    def kept_inputs(self) -> tuple[int, ...]:
        return () if self._name in KEEPS_NOTHING else tuple(range(self.arity))

    def kept_besides(self, shape: Shape, width: int) -> int:
        return width * math.prod(shape) * (self._name in COMPOSED)

    def transient_bytes(self, inputs: Sequence[int], shape: Shape) -> int:
        return 2 * max(inputs)

    @property
    def is_cheap(self) -> bool:
        return not self.weights


@dataclass(frozen=True)
class Positions(Layer):
    """A tensor of `out_channels` that is computed from the size of the whole image alone, with `whole_values` values a
    pixel of it at once. Its input says how large that is."""

    out_channels: int
    whole_values: int = 0

    asks_place = True
    protects_output = True  # all images are one in memory
    gradient = "none"

    def output_channels(self, channels: int, *others: int) -> int:
        return self.out_channels


@dataclass(frozen=True)
class OfOnePixel(Layer):
    """A layer with `weights` weights of a tensor whose pixels are all the same: computed for one, and taken for all."""

    out_channels: int
    weights: int = 0

    protects_output = True
    is_flat = True
    kept_inputs = (0,)

    def parameters(self, channels: int) -> int:
        return self.weights


@dataclass(frozen=True)
class ZeroAtZero(Layer):
    """A function of single values that is zero at zero."""

    keeps_zero = True
    kept_inputs = (0,)

    def transient_bytes(self, inputs: Sequence[int], shape: Shape) -> int:
        return max(inputs)  # PReLU's gradient of its slope, before it is summed


@dataclass(frozen=True)
class Mark(Layer):
    """A place of its own for a tensor that a later layer takes up: it hands its input on."""

    keeps_zero = True
    hands_on = True
    gradient = "same"


@dataclass(frozen=True)
class Dropout(Layer):
    """Dropout of whole channels with `probability`, the same over the whole image; `of_images`: of all at once."""

    probability: float = 0.0
    of_images: bool = False

    keeps_zero = True

    @property
    def hands_on(self) -> bool:
        return self.probability == 0

    @property
    def gradient(self) -> str:
        return "same" if self.hands_on else "new"

    def kept_besides(self, shape: Shape, width: int) -> int:
        return width * (1 if self.of_images else shape[0])  # factors

    def output_width(self, at_hand: int, width: int) -> int:
        return width


@dataclass(frozen=True)
class Activation(Layer):
    """Leaky ReLU, or another activation that is zero at zero."""

    negative_slope: float = 0.01

    keeps_zero = True
    overwrites = True
    kept_inputs = (0,)


@dataclass(frozen=True)
class Sigmoid(Layer):
    """1 / (1 + exp(-x)): what a gate multiplies by."""

    keeps_output = True


@dataclass(frozen=True)
class Norm(Layer):
    """Normalisation over `kind`: none, pixel (channels of each pixel), instance, group or batch.

    `affine`: True if it has weights. `running`: True for a batch norm with running statistics; `still`: True if these
    are constants in training too. `times`: a weight is that of a channel of so many times.
    """

    kind: str = "none"
    groups: int = 1
    affine: bool = True
    running: bool = True
    still: bool = False
    times: int = 1

    @property
    def keeps_zero(self) -> bool:
        return self.hands_on

    def parameters(self, channels: int) -> int:
        return 2 * channels // self.times if self.affine and not self.hands_on else 0

    @property
    def statistics(self) -> str | None:
        return None if self.still else {"instance": "image", "group": "image", "batch": "batch"}.get(self.kind)

    @property
    def tracks(self) -> bool:
        return self.kind == "batch" and self.running and not self.still

    @property
    def is_still(self) -> bool:
        return self.still

    @property
    def stilled(self) -> Norm:
        return replace(self, still=True) if self.tracks else self

    @property
    def needs_pixels(self) -> bool:
        return self.statistics is not None and self.kind != "group"  # which has several channels

    def in_words(self, module: str | None) -> str:
        return f"model.norm is {self.kind}" if module is None else f"'{module}' is a norm of kind {self.kind}"

    def statistic_sets(self, channels: int) -> int:
        return self.groups if self.kind == "group" else channels // self.times

    def shared_values(self, channels: int, ranks: int) -> tuple[int, int]:
        """Count a number, means and variances in a slot of each rank; backward gradients of mean and deviation."""
        sets = self.statistic_sets(channels)
        return ((1 + 2 * sets) * ranks, 2 * sets) if self.statistics else (0, 0)

    @property
    def hands_on(self) -> bool:
        return self.kind == "none"

    @property
    def kept_inputs(self) -> tuple[int, ...]:
        return () if self.hands_on else (0,)

    @property
    def gradient(self) -> str:
        return "same" if self.hands_on else "new"

    @property
    def returns_view(self) -> bool:
        return self.kind == "pixel"  # it computes in another layout

    def kept_besides(self, shape: Shape, width: int) -> int:
        """Return the bytes of statistics; 0 where these are constants. Pixel norm has a mean and a deviation a pixel.
        Others have, in float64, a scale a channel, a mean and a deviation a channel or group, and their count."""
        channels, height, columns = shape
        if self.still:
            return 0
        if self.kind == "pixel":
            return 2 * height * columns * self.input_width(width, width)
        return DOUBLE_BYTES * (channels + 2 * self.statistic_sets(channels) + 1)

    def gradient_bytes(self, input_bytes: int, shape: Shape) -> int:
        # The rows in which sums are taken are let go before it is made.
        return max(input_bytes, norm_work_bytes(*shape)) if self.statistics else input_bytes

    def input_width(self, at_hand: int, width: int) -> int:
        return at_hand if self.hands_on else norm_bytes(self.kind, width)

    def output_width(self, at_hand: int, width: int) -> int:
        return self.input_width(at_hand, width)
