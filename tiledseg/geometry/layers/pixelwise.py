"""Any function of single pixels, as a value: a call of torch's by name, in the layout in which its author made it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiledseg.geometry.layers.layer import Layer

# Functions whose output nothing is differentiated through; truths take one byte each.
TRUTHS = frozenset(
    ["eq", "ne", "lt", "le", "gt", "ge", "isnan", "isfinite", "logical_and", "logical_or", "logical_not", "logical_xor"]
)
CONSTANT = TRUTHS | {"detach"}


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

    def output_channels(self, channels: int, *others: int) -> int:
        return self.out_channels

    def parameters(self, channels: int) -> int:
        return sum(_product(shape) for shape in self.weights)

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
        return tuple(range(self.arity))

    @property
    def is_cheap(self) -> bool:
        return not self.weights


@dataclass(frozen=True)
class OfOnePixel(Layer):
    """A layer with `weights` weights of a tensor whose pixels are all the same: computed for one, and taken for all."""

    out_channels: int
    weights: int = 0

    protects_output = True
    is_flat = True

    def output_channels(self, channels: int, *others: int) -> int:
        return self.out_channels

    def parameters(self, channels: int) -> int:
        return self.weights


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for side in shape:
        total *= side
    return total
