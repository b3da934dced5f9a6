"""A layer as a value, without its weights: the one description of its geometry, cost and memory.

- Geometry along one dim (kernels are square). `required_input`: the positions of an input on which some outputs depend.
  `output_size`: for an input's size. `output_edge`: the place in the output of an edge between two ranks' inputs (an
  output belongs to the rank that has the middle of its input). Positions below 0 or beyond the size are padding.
- Channels: `output_channels`, `parameters`, and `multiply_adds` of an output pixel.
- Statistics over the image or the batch, which a part of the image cannot compute alone.
- Autograd: tensors kept for the backward pass, in-place operations, and the gradients of the inputs.

Methods take one value for each input, in order. The defaults here hold for a pixelwise layer; the layers in the other
files override them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from tiledseg.geometry.box import Interval

Shape = tuple[int, int, int]  # (channels, height, width)


@dataclass(frozen=True)
class Layer:
    """A layer that works pixel by pixel on one tensor: geometry and channels unchanged, no weights."""

    asks_place: ClassVar[bool] = False  # depends on its place in the image, which a tile or block must pass
    overwrites: ClassVar[bool] = False  # can overwrite its input by its output, and then keeps only this tensor
    keeps_output: ClassVar[bool] = False  # the backward pass needs its output
    owns_gradient: ClassVar[bool] = False  # its inputs' gradients are new tensors that may be written to
    straightens_gradient: ClassVar[bool] = False  # its backward pass copies an output's gradient of another layout
    can_rebuild: ClassVar[bool] = True  # one rank alone can recompute its output (norms keep their statistics)
    is_flat: ClassVar[bool] = False  # all pixels of its output share one value in memory
    sees_all: ClassVar[bool] = False  # each output depends on all positions of the later inputs, sent rank by rank

    @property
    def arity(self) -> int:
        return 1

    # Geometry.

    def required_input(self, out: Interval, index: int = 0) -> Interval:
        """Return the positions of input `index` on which the outputs `out` depend."""
        return out

    def within(self, read: Interval, size: int) -> Interval:
        """Return the positions of an input of `size` that give `read`, which may reach beyond the ends."""
        return read.clip(Interval(0, size))

    def output_size(self, size: int, *others: int) -> int:
        """Return the number of outputs for inputs of these sizes. Raises GeometryError if they do not fit."""
        return size

    def output_edge(self, edge: int, *others: int) -> int:
        """Return the place in the output of an edge between two ranks' inputs."""
        return edge

    @property
    def window_grid(self) -> int:
        """A part of its input must begin at a multiple of this."""
        return 1

    @property
    def usual_grid(self) -> int:
        """Tiles best begin at multiples of this."""
        return 1

    def scale(self, *scales: Fraction) -> Fraction:
        """Return the scale (image pixels a position) of its output before its own stride, from those of its inputs."""
        return max(scales)

    def fits_edge(self, *edges: int) -> bool:
        """Return True if inputs cut at these edges need no exchange beyond convolutions' halos."""
        return True

    def computed(self, read: int, given: int) -> int:
        """Return the number of outputs computed from `read` positions of a cut dim; all but `given` are cropped."""
        return given

    @property
    def is_padded(self) -> bool:
        """True if it pads: positions that it loses at the input's end are then padding, no remainder."""
        return False

    @property
    def padding_after(self) -> int:
        """Positions at the end of its output that are only padding: the next layer may lose as many."""
        return 0

    @property
    def pads_with_zeros(self) -> bool:
        """True if it takes positions beyond the tensor's ends as zero."""
        return False

    @property
    def clamps(self) -> bool:
        """True if it computes positions beyond the tensor's ends from those within: it reads no others."""
        return False

    @property
    def keeps_zero(self) -> bool:
        """True if it is pixelwise and maps zero to zero: it may then come after zero padding."""
        return False

    def crop(self, index: int) -> int:
        """Return the pixels that it cuts from each side of input `index`."""
        return 0

    # Channels.

    def output_channels(self, channels: int, *others: int) -> int:
        """Return the channels of its output for inputs of these channels: its field `out_channels` if it has one."""
        made: int = getattr(self, "out_channels", channels)
        return made

    def parameters(self, channels: int) -> int:
        """Count its weights: its field `weights` if it has one."""
        weights: int = getattr(self, "weights", 0)
        return weights

    def multiply_adds(self, channels: int) -> int:
        """Count the multiply-adds of an output pixel: its field `work` if it has one."""
        work: int = getattr(self, "work", 0)
        return work

    # Statistics.

    @property
    def statistics(self) -> str | None:
        """The scope of its statistics: `image`, each image; `batch`, all images; None: at most a pixel's channels."""
        return None

    @property
    def tracks(self) -> bool:
        """True if training updates running statistics."""
        return False

    @property
    def is_still(self) -> bool:
        """True if running statistics are constant, also in training."""
        return False

    @property
    def stilled(self) -> Layer:
        """The layer with constant running statistics."""
        return self

    def in_words(self, module: str | None) -> str:
        """Return the words for its statistics: of `module` in a user's network, or (None) of a configuration's key."""
        return f"{module or 'the network'} takes statistics"

    def shared_values(self, channels: int, ranks: int) -> tuple[int, int]:
        """Count the values of an all-reduce between the ranks of an image, forward and backward."""
        return 0, 0

    # Autograd.

    @property
    def hands_on(self) -> bool:
        """True if it returns its input itself."""
        return False

    @property
    def kept_inputs(self) -> tuple[int, ...]:
        """The inputs that the backward pass needs."""
        return ()

    @property
    def protects_output(self) -> bool:
        """True if no other layer may overwrite its output."""
        return self.keeps_output or self.overwrites

    @property
    def gradient(self) -> str:
        """The kind of its inputs' gradients: `new` tensors, the `same` as the output's, `parts` (views) of it, or
        `none`."""
        return "new"

    @property
    def returns_view(self) -> bool:
        """True if its output is a view: the backward pass copies the gradient of an in-place layer after it."""
        return False

    @property
    def is_cheap(self) -> bool:
        """True if recomputing it takes a few operations a value."""
        return True

    def kept_besides(self, shape: Shape, width: int) -> int:
        """Return the bytes kept besides inputs and output, for an output of `shape` and `width` bytes a value."""
        return 0

    def gradient_bytes(self, input_bytes: int, shape: Shape) -> int:
        """Return the peak bytes for the new gradient of an input of `input_bytes`."""
        return input_bytes

    def held_bytes(self, input_bytes: int, shape: Shape) -> int:
        """Return the bytes of the new gradient of an input in memory; `shape`: the output's."""
        return input_bytes

    def transient_bytes(self, inputs: Sequence[int], shape: Shape) -> int:
        """Return the further bytes that its backward pass allocates and frees; `inputs`: bytes of each input."""
        return 0

    def unfolded(self, work: int, shape: Shape) -> int:
        """Count the values that a kernel copies to multiply matrices, for `work` multiply-adds and an output
        `shape`."""
        return 0

    def input_width(self, at_hand: int, width: int) -> int:
        """Return the bytes a value from which it computes: its input has `at_hand`, the run's precision `width`."""
        return at_hand

    def output_width(self, at_hand: int, width: int) -> int:
        """Return the bytes a value of its output."""
        return at_hand
