"""A layer as a value, without its weights: the one description of its geometry, cost and memory.

- Geometry along one dim (kernels are square), from its `window`. `required_input`: the positions of an input on which
  some outputs depend. `output_size`: for an input's size. `output_edge`: the place in the output of an edge between two
  ranks' inputs (an output belongs to the rank that has the middle of its input). Positions below 0 or beyond the size
  are padding.
- Channels: `output_channels`, and `counts` of weights and multiply-adds.
- Statistics over the image or the batch, which a part of the image cannot compute alone.
- Autograd: tensors kept for the backward pass, in-place operations, and the `memory` of the gradients.

Methods take one value for each input, in order. The defaults here hold for a pixelwise layer; the layers in the other
files override them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

from tiledseg.geometry.box import Interval

Shape = tuple[int, int, int]  # (channels, height, width)


class LayerWindow(NamedTuple):
    """The window of inputs that an output reads: it begins `padding` before a multiple of `stride`, and has `reach` + 1
    positions. The input has `extra` further positions of padding at its end. `transposed`: each input gives such a
    window of outputs instead, which has `extra` further ones at its end."""

    stride: int = 1
    padding: int = 0
    reach: int = 0
    extra: int = 0
    transposed: bool = False


ONE_PIXEL = LayerWindow()


class LayerCounts(NamedTuple):
    """The numbers of a layer's weights, and of the multiply-adds of an output pixel."""

    weights: int = 0
    work: int = 0


class LayerMemory(NamedTuple):
    """Bytes of a layer besides its inputs and output. `kept`: from the forward pass on. Of the new gradient of an
    input: `gradient`, at the peak, and `held`, afterwards; None: as many as the input has. `transient`: allocated and
    freed by the backward pass. `unfolded`: of the matrix into which a kernel copies its input, forward and backward."""

    kept: int = 0
    gradient: int | None = None
    held: int | None = None
    transient: int = 0
    unfolded: int = 0


NO_MEMORY = LayerMemory()


@dataclass(frozen=True)
class Layer:
    """A layer that works pixel by pixel on one tensor: geometry and channels unchanged, no weights.

    The attributes are those of a kind of layer; a kind whose fields decide has a property in place of one.
    """

    arity: ClassVar[Any] = 1  # the number of inputs
    # Geometry.
    window: ClassVar[Any] = ONE_PIXEL
    asks_place: ClassVar[bool] = False  # depends on its place in the image, which a tile or block must pass
    sees_all: ClassVar[bool] = False  # each output depends on all positions of the later inputs, sent rank by rank
    window_grid: ClassVar[Any] = 1  # a part of its input must begin at a multiple of this
    usual_grid: ClassVar[Any] = 1  # tiles best begin at multiples of this
    padding_after: ClassVar[Any] = 0  # positions at its output's end that are padding alone: the next may lose them
    pads_with_zeros: ClassVar[Any] = False  # it takes positions beyond the tensor's ends as zero
    clamps: ClassVar[Any] = False  # it computes positions beyond the tensor's ends from those within alone
    keeps_zero: ClassVar[Any] = False  # pixelwise, and maps zero to zero: it may then come after zero padding
    # Statistics.
    statistics: ClassVar[Any] = None  # of each `image`, or of the `batch`; None: at most of a pixel's channels
    takes: ClassVar[str] = "statistics"  # in words
    tracks: ClassVar[Any] = False  # training updates running statistics
    is_still: ClassVar[Any] = False  # running statistics are constant, also in training
    # Autograd.
    hands_on: ClassVar[Any] = False  # it returns its input itself
    overwrites: ClassVar[bool] = False  # can overwrite its input by its output, and then keeps only this tensor
    kept_inputs: ClassVar[Any] = ()  # the inputs that the backward pass needs
    keeps_output: ClassVar[bool] = False  # the backward pass needs its output
    protects_output: ClassVar[bool] = False  # no other layer may overwrite its output, whether it keeps it or not
    # The precision of the values from which it computes, and of its output: `same` as its input's, that of the `run`,
    # float32 at least (`wide`), or a `byte`.
    computes_in: ClassVar[Any] = "same"
    gives_in: ClassVar[Any] = "same"
    gradient: ClassVar[Any] = "new"  # of its inputs: `new`, the `same` as its output's, `parts` of it, or `none`
    owns_gradient: ClassVar[bool] = False  # its inputs' gradients are new tensors that may be written to
    straightens_gradient: ClassVar[bool] = False  # its backward pass copies an output's gradient of another layout
    returns_view: ClassVar[Any] = False  # the backward pass copies the gradient of an in-place layer after it
    is_flat: ClassVar[bool] = False  # all pixels of its output share one value in memory
    can_rebuild: ClassVar[bool] = True  # one rank alone can recompute its output (norms keep their statistics)
    is_cheap: ClassVar[Any] = True  # recomputing it takes a few operations a value

    # Geometry.

    def required_input(self, out: Interval, index: int = 0) -> Interval:
        """Return the positions of input `index` on which the outputs `out` depend: at least one; where windows of
        outputs leave gaps, an output in a gap reads the inputs beside it."""
        if self.window is ONE_PIXEL:
            return out
        stride, padding, reach, _, transposed = self.window
        if not transposed:
            start = out.start * stride - padding
            return Interval(start, start + (out.size - 1) * stride + reach + 1)
        first, last = out.start + padding, out.stop - 1 + padding
        start = min(-((reach - first) // stride), first // stride)
        return Interval(start, max(last // stride, -((reach - last) // stride)) + 1)

    def within(self, read: Interval, size: int) -> Interval:
        """Return the positions of an input of `size` that give `read`, which may reach beyond the ends."""
        return read if read.start >= 0 and read.stop <= size else read.clip(Interval(0, size))

    def output_size(self, size: int, *others: int) -> int:
        """Return the number of outputs for inputs of these sizes. Raises GeometryError if they do not fit."""
        at: LayerWindow = self.window
        if at.transposed:
            return (size - 1) * at.stride - 2 * at.padding + at.reach + at.extra + 1
        return (size + 2 * at.padding + at.extra - at.reach - 1) // at.stride + 1

    def output_edge(self, edge: int, *others: int) -> int:
        """Return the place in the output of an edge between two ranks' inputs."""
        at: LayerWindow = self.window
        if at.transposed:
            return edge * at.stride - at.padding + at.reach // 2 - (at.stride - 1) // 2
        return -(-(edge + at.padding - at.reach // 2) // at.stride)

    def scale(self, *scales: Fraction) -> Fraction:
        """Return the scale (image pixels a position) of its output before its own stride, from those of its inputs."""
        return max(scales)

    def fits_edge(self, *edges: int) -> bool:
        """Return True if inputs cut at these edges need no exchange beyond convolutions' halos."""
        return True

    def computed(self, read: int, given: int) -> int:
        """Return the number of outputs computed from `read` positions of a cut dim; all but `given` are cropped."""
        at: LayerWindow = self.window
        return (read - 1) * at.stride + at.reach + 1 if at.transposed else given

    # Channels.

    def output_channels(self, channels: int, *others: int) -> int:
        """Return the channels of its output for inputs of these channels: its field `out_channels` if it has one."""
        return getattr(self, "out_channels", channels)

    def counts(self, channels: int) -> LayerCounts:
        """Count its weights and multiply-adds, for an input of `channels`: its fields `weights` and `work` if any."""
        return LayerCounts(getattr(self, "weights", 0), getattr(self, "work", 0))

    # Statistics.

    def in_words(self, module: str | None) -> str:
        """Return the words for its statistics: of `module` in a user's network, or (None) of a configuration's key."""
        return f"{'the network' if module is None else repr(module)} takes {self.takes}"

    def shared_values(self, channels: int, ranks: int) -> tuple[int, int]:
        """Count the values of an all-reduce between the ranks of an image, forward and backward."""
        return 0, 0

    # Autograd.

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        """Return the bytes of a step besides inputs and output. `inputs`: bytes of each; `shape`: of the output;
        `width`: bytes a value in the run's precision; `work`: all multiply-adds."""
        return NO_MEMORY
